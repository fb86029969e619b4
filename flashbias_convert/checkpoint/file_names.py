"""Names that the tensors of converted files have in them, where their model has others.

Shards keep the names of their source: transformers, timm and wrappers of training rename while they
load. The header says what the model calls them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..errors import CheckpointError
from .header import NAMES_KEY, PLAN_KEY

#: characters of a name in a message
_LONGEST = 200


def names_entry(names: Mapping[str, str]) -> dict[str, str]:
    """The entry of a header, or none if no name differs.

    Args:
        names: name in the file -> name in the model, of all tensors or some.
    """
    differing = {in_file: name for in_file, name in names.items() if in_file != name}
    return {NAMES_KEY: json.dumps(differing)} if differing else {}


def by_model_names(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """All tensors of converted files, in the same order, under the names that the model has.

    Args:
        tensors: under their names in the files.
        metadata: of the header. Where it holds no plan, nothing is converted and names stay.

    Raises:
        CheckpointError: names that are damaged, of tensors that are not there, or not unique.
    """
    names = names_of(metadata)
    require_there(names, tensors, "names a tensor")
    found: dict[str, Tensor] = {}
    for in_file, tensor in tensors.items():
        name = names.get(in_file, in_file)
        if name in found:
            raise CheckpointError(f"by its header two tensors are called {quoted(name)}")
        found[name] = tensor
    return found


def require_there(names: Iterable[str], tensors: Mapping[str, Tensor], says: str) -> None:
    """Raise CheckpointError for the first name that no tensor has.

    Args:
        names: in the files, of an entry of the header.
        tensors: of the files.
        says: what the header does with them, for the message.
    """
    absent = next((name for name in names if name not in tensors), None)
    if absent is not None:
        raise CheckpointError(
            f"the header {says} {quoted(absent)}, which is not there",
            "is this one file of several? give their folder",
        )


def names_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Name in the file -> name in the model, where they differ; none without a plan.

    Raises:
        CheckpointError: names that are damaged.
    """
    if PLAN_KEY not in metadata:
        return {}
    try:
        # an object is a tuple of pairs here, so that none hides another of the same name
        pairs = json.loads(metadata.get(NAMES_KEY, "{}"), object_pairs_hook=tuple)
        if not isinstance(pairs, tuple):
            raise ValueError("they are no object")
        for pair in pairs:
            if not isinstance(pair[1], str):
                raise ValueError(f"that of {quoted(pair[0])} is no text")
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError("a tensor is named twice")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the names in the header are damaged: {error}") from error
    return names


def quoted(name: str) -> str:
    """For messages: of any length and with any characters in the file."""
    return repr(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")

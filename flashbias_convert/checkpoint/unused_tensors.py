"""Tensors of converted files that are no weights of their model, such as indices of old releases.

Shards keep them, so that they are those of the source but for the terms. The header names them, and
who loads the model never sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..errors import CheckpointError
from .file_names import names_of, quoted, require_there
from .header import PLAN_KEY, UNUSED_KEY


def unused_entry(names: Iterable[str]) -> dict[str, str]:
    """The entry of a header, or none if every tensor is a weight or a term.

    Args:
        names: in the files.
    """
    listed = sorted(names)
    return {UNUSED_KEY: json.dumps(listed)} if listed else {}


def split_unused(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and terms of converted files, and what is neither; both in order.

    Args:
        tensors: under their names in the files.
        metadata: of the header. Where it holds no plan, nothing is converted and all is used.

    Raises:
        CheckpointError: an entry that is damaged, or names what is not there or a weight.
    """
    listed = unused_names(metadata)
    require_there(listed, tensors, "lists an unused tensor")
    unused = {name: tensors[name] for name in tensors if name in listed}
    return {name: t for name, t in tensors.items() if name not in unused}, unused


def unused_names(metadata: Mapping[str, str]) -> dict[str, None]:
    """Names in the files of what is neither weight nor term, in order.

    Raises:
        CheckpointError: an entry that is damaged, or names a weight.
    """
    if PLAN_KEY not in metadata:
        return {}
    try:
        listed = json.loads(metadata.get(UNUSED_KEY, "[]"))
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ValueError("it is no list of names")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the list of unused tensors is damaged: {error}") from error
    found = dict.fromkeys(listed)
    if len(found) < len(listed):
        raise CheckpointError("the list of unused tensors is damaged: it names one twice")
    weights = names_of(metadata)
    both = next((name for name in found if name in weights), None)
    if both is not None:
        raise CheckpointError(f"by its header {quoted(both)} is a weight, and unused")
    return found

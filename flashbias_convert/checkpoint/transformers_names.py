"""Which key of a file is which tensor of a transformers model, told without reading any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .kept_terms import sites_of, split_terms


def candidates(keys: Iterable[str], model: Any) -> Iterator[dict[str, str]]:
    """Ways to bring the keys of files under the names of a model, each as name -> key.

    As they are; with, and without, the name that models with a head have for the rest; as this
    release of transformers renames them while it loads them (`renamed`).

    Args:
        keys: of the files.
        model: a `PreTrainedModel`; its weights are not looked at.
    """
    keys = list(keys)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    yield {key: key for key in keys}
    if prefix != ".":
        yield {key if key.startswith(prefix) else prefix + key: key for key in keys}
        yield {key.removeprefix(prefix): key for key in keys}
    names = renamed(keys, model)
    if names is not None:
        yield names


def require_known(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], model: Any, folder: Path
) -> None:
    """Raise CheckpointError unless transformers brings weights under the names of the model.

    What it does not know it leaves out, and gives the model random weights in their place.

    Args:
        names: name in the files -> name in the model that was converted, where they differ.
        tensors: of the files; only their names are looked at.
        model: what is loaded now; it may have a head less, or one more.
        folder: for messages.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = model.state_dict().keys()
    wanted = {
        key: known & {name, prefix + name, name.removeprefix(prefix)} for key, name in names.items()
    }
    # a weight that is tied to another has its numbers from that one
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wanted = {key: meant for key, meant in wanted.items() if meant - tied}
    for found in candidates(split_terms(tensors)[0], model):
        brought = {key: name for name, key in found.items()}
        if all(brought.get(key) in meant for key, meant in wanted.items()):
            return
    raise CheckpointError(
        f"transformers does not know the names that the files in {folder} have for their weights, "
        f"such as {next(iter(wanted))!r}",
        "load it with flashbias_convert.load_model, or restore it",
    )


def by_sites(terms: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Terms under the names that `model` has for its sites.

    `save_pretrained` gives those of some models back the names of old checkpoints, such as BEiT's,
    as it does with their weights, and renames those alone while it loads them.

    Args:
        terms: the second part of `kept_terms.split_terms`.
        model: any; only those of transformers have such names.
    """
    known = {name for name, _ in model.named_modules()}
    if known.issuperset(sites_of(terms)) or not hasattr(model, "base_model_prefix"):
        return dict(terms)
    names = renamed(terms, model)
    return dict(terms) if names is None else {name: terms[key] for name, key in names.items()}


def renamed(keys: Iterable[str], model: Any) -> dict[str, str] | None:
    """Name -> key as transformers' own rules have it, which keep old checkpoints in use.

    Returns:
        None where a rule makes something else of a tensor than another name, or one of two; and
        with releases of transformers that have no such rules.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:  # none of them is promised
        return None
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known: Mapping[str, Any] = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)
    found: dict[str, str] = {}
    for key in sorted(keys):  # a group of rules begins with the first of its keys
        name, converter = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, converter = rename_source_key(key, [], [], prefix, known)
        if converter is not None or name in found:
            return None
        found[name] = key
    return found

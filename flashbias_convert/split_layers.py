"""Layers that make queries, keys and values at once: how processes have split their rows.

Nothing of torch.distributed is imported here: every call of a module with split heads asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .errors import UsageError
from .seals import is_distributed

#: attribute of a layer that `ColwiseFused` has split: as how many outputs, one after the other
_SPLIT_AS = "_flashbias_split_as"


def mark_split(layer: nn.Module, parts: int) -> None:
    """Remember that each of `parts` outputs of a layer, one after the other, was split."""
    setattr(layer, _SPLIT_AS, parts)


def require_layout(site: nn.Module, layers: Mapping[str, int], name: str) -> None:
    """Raise UsageError if a layer was split into other rows than those of this process's heads.

    Args:
        site: the attention module.
        layers: `PatchedAttention.packed` of it.
        name: what a message calls it.
    """
    for key, parts in layers.items():
        layer = site._modules.get(key)
        found = None if layer is None else _split_as(layer)
        if found is not None and found != parts:
            raise UsageError(
                f"{key} of a {name} makes {_in_words(parts)}, and was split as if it made "
                f"{_in_words(found)}",
                f"split it by {'ColwiseParallel()' if parts == 1 else f'ColwiseFused({parts})'}",
            )


def _split_as(layer: nn.Module) -> int | None:
    """As how many outputs one after the other a layer was split; None if it was not, as it seems.

    `ColwiseParallel` leaves a DTensor whose rows are shared out as if they were one output. FSDP
    does so, too, and what it does is gone inside a call.
    """
    marked: int | None = layer.__dict__.get(_SPLIT_AS)
    if marked is not None or getattr(layer, "_is_fsdp_managed_module", False):
        return marked
    weight: Any = getattr(layer, "weight", None)
    if weight is None or not is_distributed(weight):
        return None
    return 1 if any(placement.is_shard(0) for placement in weight.placements) else None


def _in_words(parts: int) -> str:
    return "its rows head by head" if parts == 1 else f"{parts} outputs one after the other"

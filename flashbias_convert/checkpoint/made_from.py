"""What a file says of the weights that its terms were made from; it need not say anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..patched_attention import PatchedAttention

_SUFFIX = "score_bias.made_from"


def with_made_from(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`tensors`, with an entry that says nothing where they have none that `model` can take.

    Files of earlier releases have none, and others may count other tensors.
    """
    found = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, PatchedAttention):
            key = f"{name}.{_SUFFIX}" if name else _SUFFIX
            own, there = module.score_bias.made_from, tensors.get(key)
            if there is None or (there.shape, there.dtype) != (own.shape, own.dtype):
                found[key] = torch.zeros_like(own)
    return found


def without_narrowed(
    state: Mapping[str, Tensor],
    stored: Mapping[str, torch.dtype],
    computes: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """`state`, whose entries say nothing if the file will hold more than terms were made from.

    Args:
        state: of the patched model.
        stored: the dtypes in which the file will hold its weights.
        computes: in which terms were made, where the model keeps the dtypes of the file.
    """
    wider = any(
        torch.promote_types(dtype, used) != used
        for key, dtype in stored.items()
        if key in state and dtype.is_floating_point
        for used in [computes or state[key].dtype]
    )
    if not wider:
        return dict(state)
    return {k: torch.zeros_like(t) if k.endswith(_SUFFIX) else t for k, t in state.items()}

"""The Triton kernel as a torch operator: `flashbias_convert::attention`.

The operator takes flat tensors and a specification string, so that torch.compile, torch.export
and CUDA graphs see one opaque call whose output shape they know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import launch
from .packing import parse_spec


@torch.library.custom_op("flashbias_convert::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    causal: bool,
    cosine: bool,
) -> Tensor:
    """Attention by the Triton kernel. Arguments as made by `triton_attention`."""
    out = empty_output(q, v)
    call = {"key_mask": key_mask, "starts": query_starts}
    remaining = list(bias_tensors)
    for group in parse_spec(spec):
        own = dict(zip(group.tensors, remaining, strict=False))
        del remaining[: len(own)]
        own |= {name: t for name, t in call.items() if t is not None}
        launch(
            q,
            k,
            v,
            out,
            group,
            own,
            scale=scale if head_scale is None else head_scale,
            causal=causal,
            query_start=query_start,
            cosine=cosine,
        )
    return out


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    causal: bool,
    cosine: bool,
) -> Tensor:
    return empty_output(q, v)


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (*batch, H, N, Dv), laid out as (*batch, N, H, Dv).

    Attention modules merge heads next; in this layout that is a view.
    """
    *batch, heads, n, _ = q.shape
    return q.new_empty((*batch, n, heads, v.shape[-1])).transpose(-2, -3)

"""The Triton kernel as a torch operator: `flashbias_convert::attention`.

The operator takes flat tensors and a specification string, so that torch.compile, torch.export
and CUDA graphs see one opaque call whose output shape they know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import launch, normalize_rows
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
    bounded: bool,
) -> Tensor:
    """Attention by the Triton kernel. Arguments as made by `triton_attention`."""
    out = empty_output(q, v)
    call = {"q": q, "k": k, "v": v, "o": out}
    call |= {} if key_mask is None else {"key_mask": key_mask}
    call |= {} if query_starts is None else {"starts": query_starts}
    call |= {} if head_scale is None else {"scale": head_scale}
    first = 0
    for group in parse_spec(spec):
        last = first + len(group.tensors)
        own = dict(zip(group.tensors, bias_tensors[first:last], strict=True))
        launch(
            group,
            call | own,
            scale=scale,
            causal=causal,
            query_start=query_start,
            cosine=cosine,
            bounded=bounded,
        )
        first = last
    return out


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_output(q, v)


@torch.library.custom_op("flashbias_convert::normalize_keys", mutates_args=())
def normalize_keys(k: Tensor) -> Tensor:
    """Rows of k (*batch, H, M, D) scaled to unit length; half-precision rows become fp16."""
    return normalize_rows(k)


@normalize_keys.register_fake
def _(k: Tensor) -> Tensor:
    return k.new_empty(k.shape, dtype=k.dtype if k.dtype == torch.float32 else torch.float16)


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (*batch, H, N, Dv), laid out as (*batch, N, H, Dv).

    Attention modules merge heads next; in this layout that is a view.
    """
    *batch, heads, n, _ = q.shape
    return q.new_empty((*batch, n, heads, v.shape[-1])).transpose(-2, -3)

"""The Triton kernel as a torch operator: `flashbias_convert::attention`.

The operator takes flat tensors and a specification string, so that torch.compile, torch.export
and CUDA graphs see one opaque call whose output shape they know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .flags import BOUNDED, CAUSAL, COSINE
from .launch import launch
from .library import refuse_gradients, register
from .normalize import normalize_rows
from .packing import parse_spec


def _attention(
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
    flags: int,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention by the Triton kernel. Arguments as made by `triton_attention`."""
    cosine = bool(flags & COSINE)
    out = empty_output(q, v)
    call = {"q": q, "k": normalize_rows(k) if cosine else k, "v": v, "o": out}
    if key_mask is not None:
        call["key_mask"] = key_mask.view(torch.uint8)
    if query_starts is not None:
        call["starts"] = query_starts
    if head_scale is not None:
        call["scale"] = head_scale
    if gate is not None:
        call["gate"] = gate
    first = 0
    for group in parse_spec(spec):
        last = first + len(group.tensors)
        own = dict(zip(group.tensors, bias_tensors[first:last], strict=True))
        launch(
            group,
            call | own,
            scale=scale,
            causal=bool(flags & CAUSAL),
            query_start=query_start,
            cosine=cosine,
            bounded=bool(flags & BOUNDED),
        )
        first = last
    return out


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (*batch, H, N, Dv), laid out as (*batch, N, H, Dv).

    Attention modules merge heads next; in this layout that is a view.
    """
    *batch, heads, n, _ = q.shape
    dv = v.shape[-1]
    strides, step = [dv, heads * dv, 1], heads * n * dv
    for size in reversed(batch):
        strides.insert(0, step)
        step *= size
    return q.new_empty_strided((*batch, heads, n, dv), strides)  # no view: it may be written to


def _without_values(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_output(q, v)


#: the operator
attention_op = register(
    "attention",
    _attention,
    _without_values,
    refuse_gradients(
        "flashbias_convert::attention is for inference and has no gradients: call "
        "flashbias_attention with gradients enabled, and it takes the operator that has them"
    ),
)

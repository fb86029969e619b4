"""The Triton kernel as a torch operator: `flashbias_convert::attention`.

The operator takes flat tensors and a specification string, so that torch.compile, torch.export
and CUDA graphs see one opaque call whose output shape they know; with few queries the compiler sees
the kernels, see `traced_launch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .group_calls import empty_output, group_calls
from .launch import launch
from .library import open_in_graphs, refuse_gradients, register
from .traced_launch import kernels, open_up


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
    out = empty_output(q, v)
    if key_mask is not None:  # not in graphs: torch 2.11 does not compile such a view
        key_mask = key_mask.view(torch.uint8)
    for call in group_calls(
        out, q, k, v, bias_tensors, spec, scale, head_scale, key_mask, query_start, query_starts,
        flags, gate,
    ):  # fmt: skip
        launch(call.group, call.tensors, query_start=call.query_start, **call.options)
    return out


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

open_in_graphs(attention_op, open_up, kernels)

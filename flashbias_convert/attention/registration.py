"""The Triton kernel as a torch operator: `flashbias_convert::attention`.

The operator takes flat tensors and a specification string, so that torch.compile, torch.export
and CUDA graphs see one opaque call whose output shape they know. It is registered key by key and
not with `torch.library.custom_op`, which spends more time in Python than all of a small call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import launch
from .normalize import normalize_rows
from .packing import parse_spec

_NAME = "flashbias_convert::attention"


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
    causal: bool,
    cosine: bool,
    bounded: bool,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention by the Triton kernel. Arguments as made by `triton_attention`."""
    out = empty_output(q, v)
    call = {"q": q, "k": normalize_rows(k) if cosine else k, "v": v, "o": out}
    if key_mask is not None:
        call["key_mask"] = key_mask
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
            causal=causal,
            query_start=query_start,
            cosine=cosine,
            bounded=bounded,
        )
        first = last
    return out


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (*batch, H, N, Dv), laid out as (*batch, N, H, Dv).

    Attention modules merge heads next; in this layout that is a view.
    """
    *batch, heads, n, _ = q.shape
    return q.new_empty((*batch, n, heads, v.shape[-1])).transpose(-2, -3)


def _without_values(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_output(q, v)


# -- autograd --------------------------------------------------------------------------------------


class _NoGradients(torch.autograd.Function):
    """Calls the operator; a backward pass through it says that there is none."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        return _below_autograd(arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{_NAME} is for inference and has no gradients: call flashbias_attention with "
            "gradients enabled, and it takes the operator that has them"
        )


def _below_autograd(arguments: tuple[Any, ...]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = attention_op(*arguments)
    return out


def _with_autograd(keys: torch._C.DispatchKeySet, *arguments: Any) -> Tensor:
    """What every call outside of inference mode comes to first."""
    if torch.is_grad_enabled():
        given = (*arguments, *arguments[3])  # the fourth is a list of tensors
        tensors = [t for t in given if isinstance(t, Tensor)]
        if any(t.requires_grad for t in tensors):
            out: Tensor = _NoGradients.apply(arguments, *tensors)
            return out
    # a trace and tensors that are no plain ones have more to come; for others that would be a
    # second way through the dispatcher
    if keys.raw_repr() & _MORE_TO_COME:
        return _below_autograd(arguments)
    return _attention(*arguments)


#: bits of the keys of traces and of tensors that are no plain ones; one look is faster than two
_MORE_TO_COME: int = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
).raw_repr()

_LIBRARY = torch.library.Library("flashbias_convert", "FRAGMENT")
_LIBRARY.define(
    "attention" + torch.library.infer_schema(_attention, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _with_autograd, "Autograd", with_keyset=True)
torch.library.register_fake(_NAME, _without_values, lib=_LIBRARY)

#: the operator
attention_op = torch.ops.flashbias_convert.attention.default

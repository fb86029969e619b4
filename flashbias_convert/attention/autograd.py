"""The operator that gives gradients: `flashbias_convert::attention_training`.

Like `flashbias_convert::attention` it takes flat tensors and a specification string, but tensors
that are not rounded yet; see `training_packing`. The backward pass is an operator of its own, so
that torch.compile sees two opaque calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backward import Saved, attention_gradients, empty_gradient
from .flags import CAUSAL, COSINE, DETERMINISTIC
from .group_calls import empty_output
from .launch import launch
from .library import refuse_gradients, register
from .normalize import normalize_rows
from .packing import parse_spec
from .precision import without_autocast
from .second_derivative import INSTEAD
from .training_packing import rounded


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
) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each row in two parts, fp32 (*batch, H, N, 2).

    The parts are what was subtracted from a row's scores before exponentials were taken, in natural
    units, and one by the sum of these; zero where a row sees no key. One number would lose the
    differences of a row far from zero. The bias is as packed by `pack_for_training`; other
    arguments as made by `training_attention`.
    """
    causal, cosine = bool(flags & CAUSAL), bool(flags & COSINE)
    out, lse = empty_output(q, v), _empty_rows(q)
    call = {"q": q, "k": normalize_rows(k) if cosine else k, "v": v, "o": out, "lse": lse}
    call |= {} if key_mask is None else {"key_mask": key_mask.view(torch.uint8)}
    call |= {} if query_starts is None else {"starts": query_starts}
    call |= {} if head_scale is None else {"scale": head_scale}
    half, first = q.dtype != torch.float32, 0
    for spec_of_group in parse_spec(spec):
        last = first + len(spec_of_group.tensors)
        raw = dict(zip(spec_of_group.tensors, bias_tensors[first:last], strict=True))
        group, own = rounded(spec_of_group, raw, half=half, scale=scale, head_scale=head_scale)
        launch(
            group, call | own, scale=scale, causal=causal, query_start=query_start, cosine=cosine
        )
        first = last
    return out, lse


def _without_values(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_output(q, v), _empty_rows(q)


def _empty_rows(q: Tensor) -> Tensor:
    """For what the forward kernel leaves of a row: two numbers in fp32, one in half precision."""
    numbers = 2 if q.dtype == torch.float32 else 1
    return q.new_empty((*q.shape[:-1], numbers), dtype=torch.float32)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    flags: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Gradients of `attention_training`: of q, k, v, head_scale and each bias tensor, if wanted.

    torch.use_deterministic_algorithms is looked at when it runs, not when a graph is made.
    """
    deterministic = bool(flags & DETERMINISTIC) or torch.are_deterministic_algorithms_enabled()
    saved = Saved(
        q, k, v, out, lse, bias_tensors, spec, scale, head_scale, key_mask, query_start,
        query_starts, bool(flags & CAUSAL), bool(flags & COSINE), deterministic,
    )  # fmt: skip
    found, of_terms = attention_gradients(saved, dout, wanted)
    return [*found.values(), *(t for t in of_terms if t is not None)]


def _backward_without_values(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    flags: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    found = [empty_gradient(t) for t, want in zip((q, k, v), wanted[:3], strict=True) if want]
    if wanted[3] and head_scale is not None:
        found.append(torch.empty_like(head_scale))
    terms = zip(bias_tensors, wanted[4:], strict=True)
    return found + [t.new_empty(t.shape) for t, want in terms if want]


class _Differentiable(torch.autograd.Function):
    """Both operators. Tensors that may ask for gradients are given once more, one by one."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Any], arguments: tuple[Any, ...], *tensors: Tensor | None
    ) -> Any:
        q, k, v, bias_tensors, spec, scale, head_scale, key_mask, start, starts, flags = arguments
        out, lse = call(*arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, out, lse, head_scale, key_mask, starts, *bias_tensors)
        ctx.numbers = (spec, scale, start, flags)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dout is None or not any(wanted):
            return (None, None, *(None for _ in wanted))
        q, k, v, out, lse, head_scale, key_mask, starts, *bias_tensors = ctx.saved_tensors
        spec, scale, start, flags = ctx.numbers
        found = iter(
            without_autocast(
                q.device, attention_backward_op,
                dout, q, k, v, out, lse, bias_tensors, spec, scale, head_scale, key_mask, start,
                starts, flags, wanted,
            )
        )  # fmt: skip
        return (None, None, *(next(found) if want else None for want in wanted))


def _record(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    q, k, v, bias_tensors, _, _, head_scale, *_ = arguments
    return _Differentiable.apply(call, arguments, q, k, v, head_scale, *bias_tensors)


#: the operators
attention_training_op = register("attention_training", _attention, _without_values, _record)
attention_backward_op = register(
    "attention_backward",
    _backward,
    _backward_without_values,
    refuse_gradients(f"flashbias_convert's attention kernel has no second derivative: {INSTEAD}"),
)

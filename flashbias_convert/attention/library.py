"""Operators of torch, registered key by key.

`torch.library.custom_op` would take fewer lines, but spends more time in Python than all of a small
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_NAMESPACE = "flashbias_convert"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")

#: bits of the keys of traces and of tensors that are no plain ones; one look is faster than many
_MORE_TO_COME: int = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)
).raw_repr()


def register(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    record: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
) -> Any:
    """Make `run` the operator `flashbias_convert::name`, which changes none of its arguments.

    Args:
        name: of the operator.
        run: what it does, on any device; its annotations are the schema.
        fake: what stands for it in traces, by shapes only.
        record: called where an argument asks for gradients, or may have a tangent, with the
            operator as it is below autograd and its arguments; calls it, and has outputs that
            autograd knows. It is to refuse tangents, as `torch.autograd.Function` does.

    Returns:
        The operator.
    """
    _LIBRARY.define(
        name + torch.library.infer_schema(run, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    op = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def below_autograd(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        # traces and tensors that are no plain ones have more to come; for others that would be a
        # second way through the dispatcher
        if not keys.raw_repr() & _MORE_TO_COME:
            return run(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    def with_autograd(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        """What every call outside of inference mode comes to first."""
        recorded = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        # kernels write no tangents: that they are missing would look like derivatives of zero
        if recorded or forward_ad._current_level >= 0:
            return record(partial(below_autograd, keys), arguments)
        return below_autograd(keys, *arguments)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, with_autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return op


def open_in_graphs(
    op: Any, open_up: Callable[..., Any], kernels: Callable[[], Iterable[Any]]
) -> None:
    """Let graphs hold what an operator consists of, as those of `torch.library.triton_op` do.

    Args:
        op: the operator.
        open_up: rule of `FunctionalTensorMode`, see `torch.library.register_torch_dispatch`; runs
            operators and kernels of `torch.library.wrap_triton`, or asks the mode for the operator.
        kernels: all that graphs may come to hold. Graphs on disk are found by their text.
    """
    from torch._library.triton import triton_ops_to_kernels
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, open_up, lib=_LIBRARY)
    known: dict[str, Any] = triton_ops_to_kernels
    known[op._name] = _Later(kernels)


class _Later:
    """What `make` gives, made when somebody goes through it: nothing imports Triton before."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def refuse_gradients(
    reason: str,
) -> Callable[[Callable[..., Any], tuple[Any, ...]], Any]:
    """For `register`: the operator runs, and a backward pass through it raises RuntimeError."""

    def record(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        lists = [a for a in arguments if isinstance(a, list)]
        given = [*arguments, *(item for each in lists for item in each)]
        return _Refused.apply(reason, call, arguments, *[t for t in given if isinstance(t, Tensor)])

    return record


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reason: str,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        *tensors: Tensor,
    ) -> Any:
        ctx.reason = reason
        made = call(*arguments)
        return tuple(made) if isinstance(made, list) else made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.reason)

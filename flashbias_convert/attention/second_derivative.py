"""Second derivatives, which no fused attention has: whoever asks is told what does have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: what to do instead
INSTEAD = "use backend='eager' where gradients of gradients are needed"
#: what the nodes of torch's fused attention are called
_FUSED = "ScaledDotProduct"


def refuse_second_derivatives(out: Tensor, inputs: Iterable[Tensor | None]) -> None:
    """Let gradients of gradients through torch's fused attention raise RuntimeError, and say why.

    torch raises one, too, but names a function that the caller never heard of; so it still does
    under torch.compile, and for autograd around torch.func. What torch computes in single steps has
    second derivatives, and is left alone.

    Args:
        out: of `torch.nn.functional.scaled_dot_product_attention`.
        inputs: what it was called with; no leaves, which would keep what is registered with them.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    if out.grad_fn is None or not out.grad_fn.name().startswith(_FUSED):
        return
    for x in inputs:
        if x is not None and x.requires_grad:
            x.register_hook(_once)


def differentiates_twice() -> bool:
    """Whether transforms of torch.func ask for a derivative of a derivative, or a forward one."""
    from torch._C._functorch import TransformType, get_interpreter_stack

    kinds = [level.key() for level in get_interpreter_stack() or ()]
    return TransformType.Jvp in kinds or kinds.count(TransformType.Grad) > 1


def _once(gradient: Tensor | None) -> Tensor | None:
    """A gradient that cannot be differentiated, where a graph of it is made.

    None stands for a gradient of nothing: what comes after attention may have none.
    """
    if gradient is None or not gradient.requires_grad:
        return None
    refused: Tensor = _Refused.apply(gradient)
    return refused


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RuntimeError(f"torch's fused attention has no second derivative: {INSTEAD}")

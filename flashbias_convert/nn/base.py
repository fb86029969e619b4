"""What the modules that give a score bias have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from ..errors import UsageError


class LearnableBias(nn.Module):
    """Base of the modules here: their forward gives a `ScoreBias` for `heads` heads.

    Args:
        heads: number of query heads, H.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        require_positive("heads", heads)
        self.heads = heads

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def at_least_fp32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.element_size() < 4
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(at_least_fp32, recurse)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def require_positive(name: str, size: int) -> None:
    """Raise UsageError unless a size is a positive integer."""
    if type(size) is not int or size < 1:
        raise UsageError(f"{name} must be a positive integer, got {size!r}")

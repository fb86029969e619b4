"""What the tensors of a bias do not say, and the user does."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError


@dataclass(frozen=True)
class Sizes:
    """What no tensor shows.

    Attributes:
        window: one to three numbers of tokens, one for both sides of a square; () if not given.
        tokens: length of a sequence, where tensors leave it open.
        dtype: what biases are computed in; half precision is widened to it.
    """

    window: tuple[int, ...] = ()
    tokens: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def sides(self) -> tuple[int, ...]:
        """The window along every axis."""
        return self.window * 2 if len(self.window) == 1 else self.window

    def wide(self, tensor: Tensor) -> Tensor:
        """The tensor in at least the dtype to compute in; this reads it."""
        return tensor.to(torch.promote_types(tensor.dtype, self.dtype))


def parse_window(text: str) -> tuple[int, ...]:
    """ "16", "8x16" or "2x6x12".

    Raises:
        UsageError: anything else.
    """
    sides = re.fullmatch(r"[0-9]{1,6}(?:x[0-9]{1,6}){0,2}", text)
    found = tuple(int(side) for side in text.split("x")) if sides else ()
    if not found or 0 in found:
        raise UsageError(
            f"a window is a size such as 16, 8x16 or 2x6x12, got {text!r}", "see --window"
        )
    return found

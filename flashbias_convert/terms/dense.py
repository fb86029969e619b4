"""The bias itself: always exact, still one fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, castable_tensor, joint_shape, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Dense(Term):
    """Adds ``bias[h, i, j]``.

    Attributes:
        bias: floating point, shape (*batch, H or 1, N, M). Follows its model's dtype.
    """

    kind: ClassVar[str] = "dense"
    head_dims: ClassVar[dict[str, int]] = {"bias": -3}

    bias: Tensor = castable_tensor()

    def __post_init__(self) -> None:
        require_shape("bias", self.bias, 3, "(*batch, H, N, M)")

    def sizes(self) -> list[tuple[str, int, str]]:
        n, m = self.bias.shape[-2:]  # not `int` of them: that fixes the sizes of an export
        return [("bias", n, "queries"), ("bias", m, "keys")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        return self.bias.to(dtype)

    def batch_shape(self) -> tuple[int, ...]:
        own = tuple(self.bias.shape[:-3])
        return joint_shape(own, self._row_scale_batch())

"""A value on the diagonal: what a low-rank term cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Diagonal(Term):
    """Adds ``values[h, i]`` where query i meets itself among the keys, and 0 elsewhere.

    Query i stands at key query_start + i. Low rank plus diagonal covers biases that the paper's
    limitation section excludes, such as a distance with a singular diagonal.

    Attributes:
        values: fp32, shape (*batch, H or 1, N).
    """

    kind: ClassVar[str] = "diagonal"
    head_dims: ClassVar[dict[str, int]] = {"values": -2}

    values: Tensor = pinned_tensor()

    def __post_init__(self) -> None:
        require_shape("values", self.values, 2, "(*batch, H, N)")

    def sizes(self) -> list[tuple[str, int, str]]:
        return [("values", self.values.shape[-1], "queries")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        own = query_start + torch.arange(n, device=self.values.device)
        meets = torch.arange(m, device=own.device) == own[:, None]
        return self.values.to(dtype)[..., None] * meets.to(dtype)

    def batch_shape(self) -> tuple[int, ...]:
        own = tuple(self.values.shape[:-2])
        return joint_shape(own, self._row_scale_batch())

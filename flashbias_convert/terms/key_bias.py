"""A bias that depends on the key alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyBias(Term):
    """Adds ``values[h, j]`` to every query's score for key j.

    Attributes:
        values: fp32, shape (*batch, H or 1, M).
    """

    kind: ClassVar[str] = "key_bias"
    head_dims: ClassVar[dict[str, int]] = {"values": -2}

    values: Tensor = pinned_tensor()

    def __post_init__(self) -> None:
        require_shape("values", self.values, 2, "(*batch, H, M)")

    def sizes(self) -> list[tuple[str, int, str]]:
        return [("values", self.values.shape[-1], "keys")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)[..., None, :].expand(*self.values.shape[:-1], n, m)

    def batch_shape(self) -> tuple[int, ...]:
        own = tuple(self.values.shape[:-2])
        return joint_shape(own, self._row_scale_batch())

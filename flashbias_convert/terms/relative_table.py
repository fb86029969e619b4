"""A bias that looks up a table at the sum of a query code and a key code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require, require_integer, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class RelativeTable(Term):
    """Adds ``table[h, u[i] + v[j]]``.

    Every bias of a relative position has this form: 1-D buckets (T5), 2-D windows (Swin, SwinV2,
    BEiT with its CLS row and column), 3-D windows (Video Swin, Pangu). The table stays exact, and
    small: T entries a head instead of N x M.

    Attributes:
        table: fp32, shape (*batch, H or 1, T).
        u: integers, shape (N,), the query codes.
        v: integers, shape (M,), the key codes; 0 <= u[i] + v[j] < T for all i, j.
    """

    kind: ClassVar[str] = "relative_table"
    head_dims: ClassVar[dict[str, int]] = {"table": -2}

    table: Tensor = pinned_tensor()
    u: Tensor = pinned_tensor()
    v: Tensor = pinned_tensor()

    def __post_init__(self) -> None:
        require_shape("table", self.table, 2, "(*batch, H, T)")
        for name in ("u", "v"):
            codes = getattr(self, name)
            require_integer(name, codes)
            if codes.dim() != 1:
                raise ValueError(f"{name} must be one-dimensional, got {tuple(codes.shape)}")

    def check_codes(self) -> None:
        """Raise ValueError if a code points outside the table (reads the codes: synchronises)."""
        low = int(self.u.min() + self.v.min())
        high = int(self.u.max() + self.v.max())
        size = self.table.shape[-1]
        require(
            low >= 0 and high < size,
            f"relative codes reach from {low} to {high}, but the table has {size} entries",
        )

    def sizes(self) -> list[tuple[str, int, str]]:
        return [("u", self.u.shape[0], "queries"), ("v", self.v.shape[0], "keys")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        index = self.u.long()[:, None] + self.v.long()[None, :]
        return self.table.to(dtype)[..., index]

    def batch_shape(self) -> tuple[int, ...]:
        own = tuple(self.table.shape[:-2])
        return joint_shape(own, self._row_scale_batch())

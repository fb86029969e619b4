"""A bias that looks up a table at a code per pair, such as the distance in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require, require_integer, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookup(Term):
    """Adds ``table[h, code[i, j]]``: one small integer per pair for all heads (Graphormer).

    Attributes:
        table: fp32, shape (*batch, H or 1, T).
        code: integers, shape (*batch, N, M), all in 0 ... T - 1.
    """

    kind: ClassVar[str] = "lookup"
    head_dims: ClassVar[dict[str, int]] = {"table": -2}

    table: Tensor = pinned_tensor()
    code: Tensor = pinned_tensor()

    def __post_init__(self) -> None:
        require_shape("table", self.table, 2, "(*batch, H, T)")
        require_shape("code", self.code, 2, "(*batch, N, M)")
        require_integer("code", self.code)

    def check_codes(self) -> None:
        """Raise ValueError if a code points outside the table (reads the codes: synchronises)."""
        low, high, size = int(self.code.min()), int(self.code.max()), self.table.shape[-1]
        require(
            low >= 0 and high < size,
            f"codes reach from {low} to {high}, but the table has {size} entries",
        )

    def sizes(self) -> list[tuple[str, int, str]]:
        n, m = self.code.shape[-2:]  # not `int` of them: that fixes the sizes of an export
        return [("code", n, "queries"), ("code", m, "keys")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        batch = torch.broadcast_shapes(self.table.shape[:-2], self.code.shape[:-2])
        heads, entries = self.table.shape[-2:]
        table = self.table.to(dtype).expand(*batch, heads, entries)
        code = self.code.long().expand(*batch, n, m).flatten(-2)[..., None, :]
        found = table.gather(-1, code.expand(*batch, heads, n * m))
        return found.unflatten(-1, (n, m))

    def batch_shape(self) -> tuple[int, ...]:
        shapes = (tuple(self.table.shape[:-2]), tuple(self.code.shape[:-2]))
        return joint_shape(*shapes, self._row_scale_batch())

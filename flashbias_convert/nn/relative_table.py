"""A number for every offset in a window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..terms import RelativeTable, ScoreBias
from .base import LearnableBias, require_positive


class RelativeTableBias(LearnableBias):
    """A number for every offset between two cells of a window: Swin's bias, in any dimension.

    Adds ``table[h, offset(i, j)]``: cells are counted row by row, and the table has an entry for
    each of the (2 s_1 - 1) (2 s_2 - 1) ... offsets. It starts as no bias.

    Args:
        heads: number of query heads, H.
        window: sizes (s_1, s_2, ...) of the window; N = M = their product. (N,) for sequences.

    Raises:
        UsageError: a size that is not positive, or none at all.
    """

    u: Tensor
    v: Tensor

    def __init__(self, heads: int, window: Sequence[int]) -> None:
        super().__init__(heads)
        self.window = tuple(window)
        if not self.window:
            raise UsageError("window must have at least one size")
        for size in self.window:
            require_positive("a size of window", size)
        entries = math.prod(2 * size - 1 for size in self.window)
        self.table = nn.Parameter(torch.zeros(heads, entries))
        cells = torch.cartesian_prod(*(torch.arange(size) for size in self.window))
        cells = cells.reshape(-1, len(self.window))
        spans = [2 * size - 1 for size in self.window]
        strides = torch.tensor([math.prod(spans[i + 1 :]) for i in range(len(spans))])
        last = torch.tensor(self.window) - 1
        for name, codes in (("u", cells @ strides), ("v", (last - cells) @ strides)):
            self.register_buffer(name, codes.int(), persistent=False)

    def forward(self) -> ScoreBias:
        """Terms for the window's cells as queries and keys."""
        term = RelativeTable(table=self.table, u=self.u, v=self.v)
        return ScoreBias((term,), self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, window={self.window}"

"""A free bias of low rank."""

from __future__ import annotations

import torch
from torch import nn

from ..terms import LowRank, ScoreBias
from .base import LearnableBias, require_positive


class LowRankBias(LearnableBias):
    """A free bias of `rank` for every head: adds ``phi_q[h, i] . phi_k[h, j]``.

    It starts as no bias at all: `phi_k` is zero, and `phi_q` is drawn so that its rows have length
    one, about. Source: FlashBias, equation 3.

    Args:
        heads: number of query heads, H.
        n: number of queries, N.
        m: number of keys, M.
        rank: R, columns of both factors. Kernels compute with 16, 32, 64, ... of them.

    Raises:
        UsageError: a size that is not positive.
    """

    def __init__(self, heads: int, n: int, m: int, rank: int) -> None:
        super().__init__(heads)
        for name, size in (("n", n), ("m", m), ("rank", rank)):
            require_positive(name, size)
        self.phi_q = nn.Parameter(torch.empty(heads, n, rank))
        self.phi_k = nn.Parameter(torch.empty(heads, m, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `phi_q` anew and set `phi_k` to zero."""
        nn.init.normal_(self.phi_q, std=self.phi_q.shape[-1] ** -0.5)
        nn.init.zeros_(self.phi_k)

    def forward(self) -> ScoreBias:
        """Terms for N queries and M keys."""
        return ScoreBias((LowRank(phi_q=self.phi_q, phi_k=self.phi_k),), self.heads)

    def extra_repr(self) -> str:
        (_, n, rank), m = self.phi_q.shape, self.phi_k.shape[1]
        return f"heads={self.heads}, n={n}, m={m}, rank={rank}"

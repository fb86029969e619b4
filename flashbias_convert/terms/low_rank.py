"""A bias that is a product of two thin matrices: the form that FlashBias is named for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require, require_shape
from .constants import columns_past, kept


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank(Term):
    """Adds ``phi_q[h, i] . phi_k[h, j]`` (FlashBias, equation 3).

    Heads may have different ranks: columns past a head's own rank are ignored.

    Attributes:
        phi_q: fp32, shape (*batch, H or 1, N, R).
        phi_k: fp32, shape (*batch, H or 1, M, R).
        ranks: the rank of each of this term's heads, each at most R; None means R for all.
        split: how many leading columns a half-precision kernel must carry as a high and a low
            part because their rounding would show in the logits; None means all of them. A
            decomposition that loses more than the rounding anyway can pass 0.
    """

    kind: ClassVar[str] = "low_rank"
    head_dims: ClassVar[dict[str, int]] = {"phi_q": -3, "phi_k": -3}

    phi_q: Tensor = pinned_tensor()
    phi_k: Tensor = pinned_tensor()
    ranks: tuple[int, ...] | None = None
    split: int | None = None

    def __post_init__(self) -> None:
        require_shape("phi_q", self.phi_q, 3, "(*batch, H, N, R)")
        require_shape("phi_k", self.phi_k, 3, "(*batch, H, M, R)")
        r_q, r_k = self.phi_q.shape[-1], self.phi_k.shape[-1]
        require(r_q == r_k, f"phi_q and phi_k must have the same rank, got {r_q} and {r_k}")
        if self.ranks is None:
            return
        heads = self.num_own_heads()
        require(
            len(self.ranks) == heads and all(0 <= r <= r_q for r in self.ranks),
            f"ranks must be {heads} numbers from 0 to {r_q}, got {self.ranks}",
        )

    @property
    def max_rank(self) -> int:
        """R, the number of columns."""
        return int(self.phi_q.shape[-1])

    @property
    def largest_rank(self) -> int:
        """The number of columns that some head uses."""
        return max(self.ranks) if self.ranks else self.max_rank

    def head_ranks(self) -> tuple[int, ...]:
        """The rank of each of this term's own heads."""
        return self.ranks or (self.max_rank,) * self.num_own_heads()

    def masked_phi_q(self) -> Tensor:
        """phi_q with zeros past each head's rank."""
        if self.ranks is None or min(self.ranks) == self.max_rank:
            return self.phi_q
        past = kept(columns_past, self.ranks, self.max_rank, self.phi_q.device)
        return self.phi_q.masked_fill(past, 0.0)

    def sizes(self) -> list[tuple[str, int, str]]:
        return [
            ("phi_q", self.phi_q.shape[-2], "queries"),
            ("phi_k", self.phi_k.shape[-2], "keys"),
        ]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        return self.masked_phi_q().to(dtype) @ self.phi_k.to(dtype).transpose(-1, -2)

    def batch_shape(self) -> tuple[int, ...]:
        own = (tuple(self.phi_q.shape[:-3]), tuple(self.phi_k.shape[:-3]))
        return joint_shape(*own, self._row_scale_batch())

    def _select_static(self, index: Sequence[int]) -> dict[str, Any]:
        if self.ranks is None or len(self.ranks) == 1:
            return {}
        return {"ranks": tuple(self.ranks[i] for i in index)}

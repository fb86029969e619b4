"""Whether factors pay that have to be made first: what they save in all calls that they serve."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import costs
from .costs import affordable_rank
from .factor_times import factors_ms, is_measured


@dataclass(frozen=True)
class Serving:
    """The calls that will use what is made of a bias now.

    Attributes:
        calls: how many there are.
        rows: entries of the batch in one of them.
        card: class of the card, see `cost_tables.CLASSES`; None if it is not known.
        in_vain: factors of another structure, no smaller, were made and did not pay.
    """

    calls: int
    rows: int = 1
    card: str | None = costs.CARDS
    in_vain: bool = False


@dataclass(frozen=True)
class Site:
    """The bias in question: its matrices, and the calls that it serves.

    Attributes:
        batch: matrices for each head.
        heads: those that may have factors.
        n, m: queries and keys.
        head_dim: size of a head; None if it is not known.
        serving: what uses the terms.
    """

    batch: int
    heads: int
    n: int
    m: int
    head_dim: int | None
    serving: Serving

    def saved_ms(self, ps_per_score: float) -> float:
        """Milliseconds that all calls save with so much less for each score of one head."""
        return 1e-9 * ps_per_score * self.serving.calls * self.serving.rows * self.n * self.m

    def spent_ms(self, rank: int) -> float:
        """Milliseconds to make factors of this rank."""
        rank = min(rank, self.n, self.m)
        return factors_ms(self.batch * self.heads, self.n, self.m, rank, self.serving.card)

    def dense_ps(self) -> float:
        """Picoseconds per score that the bias costs a kernel."""
        return costs.added_cost("dense", self.n, self.m, head_dim=self.head_dim)

    def less_ps(self, rank: int) -> float:
        """Picoseconds per score that factors of this rank cost a kernel less than the bias does."""
        own = costs.added_cost("low_rank", self.n, self.m, rank, self.head_dim)
        return self.dense_ps() - own

    def gain_ms(self, rank: int) -> float:
        """What calls save if all heads have factors of this rank, which costs a kernel less."""
        return self.heads * self.saved_ms(self.less_ps(rank))

    def ranks(self, rank: int | None = None) -> list[int]:
        """Those that cost a kernel less than the bias does: of all, or this one."""
        if rank is not None:
            return [rank] if self.less_ps(rank) > 0 else []
        most = affordable_rank(self.n, self.m, self.head_dim)
        return [bucket for bucket in costs.BUCKETS if bucket <= most]

    def paying_rank(self, rank: int | None = None) -> int:
        """The largest rank for which it pays to make factors, if all heads get by with it; or 0.

        Args:
            rank: this one, or none.
        """
        if self.serving.in_vain:
            return 0
        return max((r for r in self.ranks(rank) if self.gain_ms(r) > self.spent_ms(r)), default=0)

    def reason_against(self, rank: int | None = None) -> str:
        """Why no rank pays; empty if kernels are no faster with any.

        Args:
            rank: this one, or none.
        """
        ranks = self.ranks(rank)
        if not ranks:
            return "" if rank is None else f"factors of rank {rank} cost a kernel no less"
        if self.serving.in_vain:
            return "factors of another structure, no smaller, were made and did not pay"
        if not is_measured(self.serving.card):
            card = self.serving.card or "cards like this"
            return f"how long factors take to make was not measured on {card}"
        best = max(ranks, key=lambda r: self.gain_ms(r) - self.spent_ms(r))
        return self.balance(f"factors of rank {best}", self.gain_ms(best), self.spent_ms(best))

    def balance(self, what: str, saved: float, spent: float) -> str:
        """The two sides, in words."""
        return (
            f"{what} would save {saved:.3g} ms in {self.serving.calls} calls, "
            f"and take {spent:.3g} ms to make"
        )


def calls_to_pay(
    heads: int, n: int, m: int, head_dim: int | None = None, card: str | None = costs.CARDS
) -> tuple[int, int] | None:
    """From how many calls on factors pay, for a batch of one, and the rank that needs the fewest.

    In a batch of B entries it takes a B-th of the calls.

    Args:
        heads, n, m, head_dim: see `Site`.
        card: see `Serving`.

    Returns:
        (rank, calls); None where no rank costs a kernel less, or nobody knows.
    """
    site = Site(1, heads, n, m, head_dim, Serving(1, 1, card))
    if not site.ranks() or not is_measured(card):
        return None
    ratio, rank = min((site.spent_ms(r) / site.gain_ms(r), r) for r in site.ranks())
    return rank, math.floor(ratio) + 1

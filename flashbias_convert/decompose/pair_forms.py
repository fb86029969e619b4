"""The forms that a bias can take which is made anew in each call, and where each of them pays.

As it is, it is exact. Factors, made once for many calls or by fitted networks in each, cost a
kernel less up to some rank, which depends on how long the sequence is. Costs of the kernel are
those of `costs.added_cost`; what a call takes to make the bias, or factors by networks, is measured
in `pair_times`; factors made once are told as the calls that pay for their SVD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from . import costs, pair_times
from .costs import affordable_rank
from .pair_times import Pairs
from .serving import calls_to_pay

#: sequences that a plan tells of, beside the length that it is made for
LENGTHS = (256, 512, 1024, 2048, 4096)
#: from which of them networks may begin to serve
STARTS = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
#: of networks, if nothing else is asked for; that of the paper
USUAL_RANK = 96


class PairForm(TypedDict):
    """One form of a bias that is made anew in each call; plain JSON values.

    Attributes:
        form: "dense" (as it is, exact), "factors_once" (factors made once per structure) or
            "factor_network" (factors made by fitted networks in each call).
        max_rank: the largest rank that costs less than the bias as it is, 0 where none does; None
            for the bias itself, which has no rank. Of networks all that a call does counts, where
            it is known, and else the kernel alone.
        ps_per_score: picoseconds per score that a kernel needs more than without a bias: with
            `max_rank` columns, or, where no rank costs less, with the fewest.
        ms_per_call: milliseconds on the card that a call for one structure needs more than without
            a bias: what makes the bias, or the networks, included, and the SVD of factors that are
            made once not; None where that is not known.
    """

    form: str
    max_rank: int | None
    ps_per_score: float
    ms_per_call: float | None


@dataclass(frozen=True)
class PairSite:
    """A site whose bias is made of pairs in each call.

    Attributes:
        heads: H.
        head_dim: size of a head; None if it is not known.
        pairs: what the bias is made from; None if its recipe does not say.
    """

    heads: int
    head_dim: int | None = None
    pairs: Pairs | None = None

    def kernel_ps(self, n: int, m: int, rank: int | None = None) -> float:
        """Picoseconds per score for a rank, or for the bias as it is."""
        kind = "dense" if rank is None else "low_rank"
        return costs.added_cost(kind, n, m, rank or 0, self.head_dim)

    def kernel_ms(self, n: int, m: int, rank: int | None = None) -> float | None:
        """Milliseconds of the kernel in a call for one structure."""
        if self.pairs is None:
            return None
        scores = self.pairs.rows_of(n) * self.heads * n * m
        return 1e-9 * scores * self.kernel_ps(n, m, rank)

    def dense_ms(self, n: int, m: int) -> float | None:
        """Milliseconds of a call with the bias as it is, beyond those without one."""
        kernel = self.kernel_ms(n, m)
        if self.pairs is None or kernel is None:
            return None
        return kernel + pair_times.dense_ms(self.pairs, self.heads, max(n, m))

    def networks_ms(self, n: int, m: int, rank: int) -> float | None:
        """Milliseconds of a call with factor networks, beyond those without a bias."""
        kernel = self.kernel_ms(n, m, rank)
        if self.pairs is None or kernel is None:
            return None
        return kernel + pair_times.networks_ms(self.pairs, self.heads, rank, max(n, m))

    def networks_pay(self, n: int, m: int, rank: int) -> bool:
        """Whether a call with networks takes less time than one with the bias as it is."""
        own, dense = self.networks_ms(n, m, rank), self.dense_ms(n, m)
        if own is None or dense is None:
            return self.kernel_ps(n, m, rank) < self.kernel_ps(n, m)
        return own < dense

    def network_rank(self, n: int, m: int) -> int:
        """The largest measured rank for which they do; 0 if there is none."""
        most = costs.rank_bucket(max(min(n, m), costs.SMALLEST_BUCKET))
        ranks = (rank for rank in costs.BUCKETS if rank <= most)
        return max((r for r in ranks if self.networks_pay(n, m, r)), default=0)

    def networks_from(self, rank: int) -> int | None:
        """The shortest of `STARTS` from which on networks of a rank always pay; None if never."""
        least = None
        for n in reversed(STARTS):
            if not self.networks_pay(n, n, rank):
                break
            least = n
        return least


def forms(n: int, m: int, site: PairSite) -> tuple[PairForm, ...]:
    """The forms of such a bias, the exact one first.

    Args:
        n: number of queries.
        m: number of keys.
        site: whose bias it is.
    """
    rank, fitted = affordable_rank(n, m, site.head_dim), site.network_rank(n, m)
    once, columns = (max(r, costs.SMALLEST_BUCKET) for r in (rank, fitted))
    return (
        PairForm(
            form="dense",
            max_rank=None,
            ps_per_score=site.kernel_ps(n, m),
            ms_per_call=site.dense_ms(n, m),
        ),
        PairForm(
            form="factors_once",
            max_rank=rank,
            ps_per_score=site.kernel_ps(n, m, once),
            ms_per_call=site.kernel_ms(n, m, once),
        ),
        PairForm(
            form="factor_network",
            max_rank=fitted,
            ps_per_score=site.kernel_ps(n, m, columns),
            ms_per_call=site.networks_ms(n, m, columns),
        ),
    )


def forms_in_words(n: int, m: int, site: PairSite) -> str:
    """What a plan says about a bias that is served as it is: why, and where other forms pay.

    Args:
        n, m, site: see `forms`.
    """
    cost = site.kernel_ps(n, m)
    own = affordable_rank(n, m, site.head_dim)
    ranks = {length: affordable_rank(length, length, site.head_dim) for length in LENGTHS}
    others = ", ".join(f"{rank} at {length}" for length, rank in ranks.items())
    here = f"exact, {cost:.3g} ps per score at {n} tokens; factors cost less {_rank(own)}"
    if own or any(ranks.values()):
        once = f"once per structure (factors_once{_paying(n, m, site)})"
        here = f"{here} ({others}): {once}"
    else:
        here = f"{here}, at no length"
    return f"{here}; {_fitted(site)}"


def _fitted(site: PairSite) -> str:
    """From which length on fitted networks pay, as a clause."""
    least = site.networks_from(USUAL_RANK)
    of = "" if site.pairs is not None else "in the kernel alone, "
    if least is None:
        return f"{of}fitted networks of rank {USUAL_RANK} are slower up to {STARTS[-1]} tokens"
    where = f"from {least} tokens on" if least > STARTS[0] else "at any length"
    return f"{of}fitted networks of rank {USUAL_RANK} (fit) are faster {where}"


def _paying(n: int, m: int, site: PairSite) -> str:
    """From how many calls on the SVD of factors made once has paid, as a clause."""
    found = calls_to_pay(site.heads, n, m, site.head_dim)
    if found is None:
        return ""
    rank, calls = found
    about = round(calls, min(0, 2 - len(str(calls))))  # no more digits than the estimate has
    return f": at {n} tokens its SVD pays from about {about:,} calls x batch on, at rank {rank}"


def networks_in_words(n: int, m: int, rank: int, site: PairSite) -> str | None:
    """Why a call with fitted networks of this rank is not faster at this size; None if it is.

    Args:
        n, m, site: see `forms`.
        rank: of the networks.
    """
    if rank > costs.BUCKETS[-1]:
        return f"no kernel takes factors of rank {rank}: at most {costs.BUCKETS[-1]}"
    if site.networks_pay(n, m, rank):
        return None
    own, dense = site.networks_ms(n, m, rank), site.dense_ms(n, m)
    if own is not None and dense is not None:
        return (
            f"networks of rank {rank} take {own:.2g} ms of a call at {n} tokens, with what their "
            f"factors cost the kernel, and the bias as it is {dense:.2g}, estimated from times "
            "on Hopper"
        )
    return (
        f"its factors of rank {rank} (padded {costs.rank_bucket(rank)}) add "
        f"{site.kernel_ps(n, m, rank):.3g} ps per score at {n} tokens, the bias as it is "
        f"{site.kernel_ps(n, m):.3g} (the kernel alone: its recipe does not say what it is made of)"
    )


def _rank(rank: int) -> str:
    return f"up to rank {rank}" if rank else "at no rank"

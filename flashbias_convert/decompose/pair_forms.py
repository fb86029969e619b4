"""The forms that a bias can take which is made anew in each call, and where each of them pays.

As it is, it is exact. Factors, made once for many calls or by fitted networks in each, cost a
kernel less up to some rank, which depends on how long the sequence is. All costs are those of
`costs.added_cost`; what it takes to make a bias or its factors is not among them.
"""

from __future__ import annotations

from typing import TypedDict

from . import costs

#: sequences that a plan tells of, beside the length that it is made for
LENGTHS = (256, 512, 1024, 2048, 4096)


def affordable_rank(n: int, m: int, head_dim: int | None = None) -> int:
    """The largest rank whose factors cost less than a dense bias over n queries and m keys.

    Ranks go as far as the smaller of the two, padded. 0 means that no factors cost less.

    Args:
        n: number of queries.
        m: number of keys.
        head_dim: size of a head; None if it is not known.
    """
    dense = costs.added_cost("dense", n, m, head_dim=head_dim)
    most = costs.rank_bucket(max(min(n, m), costs.SMALLEST_BUCKET))
    ranks = (rank for rank in costs.BUCKETS if rank <= most)
    return max(
        (r for r in ranks if costs.added_cost("low_rank", n, m, r, head_dim) < dense), default=0
    )


class PairForm(TypedDict):
    """One form of a bias that is made anew in each call; plain JSON values.

    Attributes:
        form: "dense" (as it is, exact), "factors_once" (factors made once per structure) or
            "factor_network" (factors made by fitted networks in each call).
        max_rank: the largest rank that costs less than the bias as it is, 0 where none does; None
            for the bias itself, which has no rank.
        ps_per_score: picoseconds per score that a kernel needs more than without a bias: with
            `max_rank` columns, or, where no rank costs less, with the fewest.
    """

    form: str
    max_rank: int | None
    ps_per_score: float


def forms(n: int, m: int, head_dim: int | None = None) -> tuple[PairForm, ...]:
    """The forms of such a bias, the exact one first.

    Args:
        n, m, head_dim: see `affordable_rank`.
    """
    rank = affordable_rank(n, m, head_dim)
    columns = costs.added_cost("low_rank", n, m, max(rank, costs.SMALLEST_BUCKET), head_dim)
    dense = costs.added_cost("dense", n, m, head_dim=head_dim)
    return (
        PairForm(form="dense", max_rank=None, ps_per_score=dense),
        PairForm(form="factors_once", max_rank=rank, ps_per_score=columns),
        PairForm(form="factor_network", max_rank=rank, ps_per_score=columns),
    )


def forms_in_words(n: int, m: int, head_dim: int | None = None) -> str:
    """What a plan says about a bias that is served as it is: why, and up to which rank factors pay.

    Args:
        n, m, head_dim: see `affordable_rank`.
    """
    cost = costs.added_cost("dense", n, m, head_dim=head_dim)
    own = affordable_rank(n, m, head_dim)
    ranks = {length: affordable_rank(length, length, head_dim) for length in LENGTHS}
    others = ", ".join(f"{rank} at {length}" for length, rank in ranks.items())
    here = f"exact, {cost:.3g} ps per score at {n} tokens; factors cost less {_rank(own)}"
    if not own and not any(ranks.values()):
        return f"{here}, at no length"
    return f"{here} ({others}): once per structure (factors_once), or fitted (fit)"


def networks_in_words(n: int, m: int, rank: int, head_dim: int | None = None) -> str | None:
    """Why fitted networks of this rank do not pay at this size, or None if they do.

    Args:
        n, m, head_dim: see `affordable_rank`.
        rank: of the networks.
    """
    own = costs.added_cost("low_rank", n, m, rank, head_dim)
    dense = costs.added_cost("dense", n, m, head_dim=head_dim)
    if own < dense:
        return None
    return (
        f"its factors of rank {rank} (padded {costs.rank_bucket(rank)}) add {own:.3g} ps per score "
        f"at {n} tokens, the bias as it is {dense:.3g}; factors cost less "
        f"{_rank(affordable_rank(n, m, head_dim))}"
    )


def _rank(rank: int) -> str:
    return f"up to rank {rank}" if rank else "at no rank"

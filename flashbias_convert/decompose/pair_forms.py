"""The forms that a bias can take which is made anew in each call, and where each of them pays.

As it is, it is exact. Factors, made once for many calls or by fitted networks in each, cost a
kernel less up to some rank, which depends on how long the sequence is. Costs are those of
`costs.added_cost`; those of factors made once are also told as the calls that pay for their SVD.
"""

from __future__ import annotations

from typing import TypedDict

from . import costs
from .costs import affordable_rank
from .serving import calls_to_pay

#: sequences that a plan tells of, beside the length that it is made for
LENGTHS = (256, 512, 1024, 2048, 4096)


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


def forms_in_words(n: int, m: int, head_dim: int | None = None, heads: int | None = None) -> str:
    """What a plan says about a bias that is served as it is: why, and up to which rank factors pay.

    Args:
        n, m, head_dim: see `affordable_rank`.
        heads: how many; None if it is not known, and then nothing is said of what an SVD takes.
    """
    cost = costs.added_cost("dense", n, m, head_dim=head_dim)
    own = affordable_rank(n, m, head_dim)
    ranks = {length: affordable_rank(length, length, head_dim) for length in LENGTHS}
    others = ", ".join(f"{rank} at {length}" for length, rank in ranks.items())
    here = f"exact, {cost:.3g} ps per score at {n} tokens; factors cost less {_rank(own)}"
    if not own and not any(ranks.values()):
        return f"{here}, at no length"
    once = f"once per structure (factors_once{_paying(n, m, head_dim, heads)})"
    return f"{here} ({others}): {once}, or fitted (fit)"


def _paying(n: int, m: int, head_dim: int | None, heads: int | None) -> str:
    """From how many calls on the SVD of factors made once has paid, as a clause."""
    found = None if heads is None else calls_to_pay(heads, n, m, head_dim)
    if found is None:
        return ""
    rank, calls = found
    about = round(calls, min(0, 2 - len(str(calls))))  # no more digits than the estimate has
    return f": at {n} tokens its SVD pays from about {about:,} calls x batch on, at rank {rank}"


def networks_in_words(n: int, m: int, rank: int, head_dim: int | None = None) -> str | None:
    """Why attention with fitted factors of this rank is not faster at this size; None if it is.

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
        f"{_rank(affordable_rank(n, m, head_dim))} (in attention alone: networks take time, too, "
        "and save the projection of the pairs)"
    )


def _rank(rank: int) -> str:
    return f"up to rank {rank}" if rank else "at no rank"

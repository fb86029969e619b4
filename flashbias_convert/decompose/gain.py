"""What a site gains by its terms, as far as measured costs tell."""

from __future__ import annotations

from collections.abc import Iterable

from ..terms import RelativeTable, Term
from .costs import (
    DENSE_SDPA,
    PLAIN,
    added_cost,
    is_measured,
    shared_dense_cost,
    time_per_score,
)
from .decision import HeadDecision


def is_paired(terms: Iterable[Term]) -> bool:
    """Whether all relative tables among these terms are `RelativeTable.pairs`."""
    return all(term.pairs for term in terms if isinstance(term, RelativeTable))


def expected_gain(
    decisions: Iterable[HeadDecision],
    masks: Iterable[str],
    n: int,
    m: int,
    head_dim: int | None = None,
    shared: bool = False,
    paired: bool = False,
) -> float | None:
    """How many times as fast as with the bias as a dense matrix in torch's fused attention.

    Of the attention call alone, forward, in bf16 on a Hopper card.

    Args:
        decisions: one per head; none where there is no bias but the masks.
        masks: kinds of the terms that all heads have beside.
        n: number of queries.
        m: number of keys.
        head_dim: size of a head; None if it is not known.
        shared: see `decompose`.
        paired: see `is_paired`.

    Returns:
        The ratio, or None where a term was never measured.
    """
    masks, decisions = tuple(masks), tuple(decisions)
    kinds = [*masks, *(kind for d in decisions for kind in d.term.split("+"))]
    if not all(is_measured(kind, head_dim) for kind in kinds):
        return None
    try:
        common = sum(added_cost(kind, n, m, head_dim=head_dim) for kind in masks)
        own = [
            sum(added_cost(kind, n, m, d.columns(), head_dim, paired) for kind in d.term.split("+"))
            for d in decisions
        ]
        plain = time_per_score(PLAIN, n, m, head_dim)
        before = time_per_score(DENSE_SDPA, n, m, head_dim)
    except ValueError:
        return None
    mean = sum(own) / len(own) if own else 0.0
    if shared and all(d.term == "dense" for d in decisions):
        mean = min(mean, shared_dense_cost(n, m, head_dim))
    return before / (plain + common + mean)

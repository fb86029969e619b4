"""What a bias would become: terms, ranks, errors and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decompose import decompose, dense_term, measure
from ..decompose.costs import added_cost
from ..decompose.svd import truncated_svd
from ..options import DecomposeOptions
from ..terms import RelativeTable, ScoreBias

#: larger matrices get no SVD here: the conversion makes one anyway, and may take its time
LARGEST_CELLS = 1280 * 1280
#: an SVD is made of at most so many entries of a batch
MOST_ENTRIES = 4


@dataclass(frozen=True, eq=False)
class Fit:
    """Terms, and what a truncation would lose.

    Attributes:
        terms: what a conversion would take, or None for a bias of each call.
        ranks: per head, for the energy; None where no SVD was made.
        attention_errors: per head, with those ranks.
        is_low_rank: whether factors are what a conversion would take for every head.
    """

    terms: ScoreBias | None
    ranks: tuple[int, ...] | None = None
    attention_errors: tuple[float, ...] | None = None
    is_low_rank: bool = False


def fit_dense(bias: Tensor, visible: Tensor | None, energy: float) -> Fit:
    """A bias (P, H, N, M) as a conversion with method "auto" would take it."""
    bias = bias[0] if len(bias) == 1 else bias
    heads, cells = bias.shape[-3], bias.shape[-2] * bias.shape[-1]
    if cells > LARGEST_CELLS:
        return Fit(ScoreBias((dense_term(bias),), heads))
    options = DecomposeOptions(energy=energy, force_all=True)
    terms = decompose(bias, options, visible=visible).bias
    ranks, errors = _ranks(bias, visible, energy)
    low = all(term.kind in ("low_rank", "diagonal") for term in terms.terms)
    return Fit(terms, ranks, errors, low)


def fit_offsets(table: RelativeTable, bias: Tensor, visible: Tensor | None, energy: float) -> Fit:
    """A bias of the offset: the table, or factors where a conversion would prefer them."""
    n, m = bias.shape[-2:]
    exact = ScoreBias((table,), bias.shape[1])
    if n * m > LARGEST_CELLS:
        return Fit(exact)
    # written out from the table, hidden cells follow the same rule as the others
    fit = fit_dense(table.dense(n, m, dtype=torch.float32).reshape(bias.shape), visible, energy)
    assert fit.terms is not None
    kinds = {term.kind for term in fit.terms.terms}
    kept = fit.is_low_rank or table.kind in kinds
    return fit if kept else Fit(exact, fit.ranks, fit.attention_errors)


def ranks_of_calls(samples: Tensor, visible: Tensor | None, energy: float) -> Fit:
    """Ranks of a bias (S, H, N, M) that every call makes anew."""
    n, m = samples.shape[-2:]
    if n * m > LARGEST_CELLS:
        return Fit(None)
    ranks, errors = _ranks(samples[:MOST_ENTRIES], visible, energy)
    low = added_cost("low_rank", n, m, max(ranks)) < added_cost("dense", n, m)
    return Fit(None, ranks, errors, low and 2 * max(ranks) < min(n, m))


def size_of(terms: ScoreBias) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in terms.named_tensors())


def _ranks(
    bias: Tensor, visible: Tensor | None, energy: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    cut = truncated_svd(bias, energy=energy, visible=visible)
    lost = measure(bias, cut.term, visible).worst_over_batch()
    return cut.needed, tuple(lost.attention_error.tolist())

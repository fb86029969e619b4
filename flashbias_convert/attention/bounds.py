"""How large the scores of a call can become, as far as its bias is concerned."""

from __future__ import annotations

import math

import torch

from ..terms import Dense, LowRank, Regions, RelativeTable, ScoreBias, Term

#: Exponentials of scores up to this size stay within 2**-60 and 2**60: far from the ends of the
#: range of bfloat16 and fp32, so that sums, and products with values, lose nothing.
LARGEST_BOUND = 60 * math.log(2)
#: rounding of packed factors and of normalised rows, with room to spare
SLACK = 1.02
#: cells of a product that is looked at in one piece
_PIECE = 2**24


def bias_bound(bias: ScoreBias) -> float | None:
    """What no |bias[i, j]| exceeds, apart from masks; reads the tensors.

    Masks are `Regions` whose value is so negative that it hides a key; every query sees those of
    its own region.

    Args:
        bias: the terms.

    Returns:
        A number, or None if a term's size is not known.
    """
    total = 0.0
    for term in bias.terms:
        own = None if term.row_scale is not None else _term_bound(term)
        if own is None:
            return None
        total += own
    return total


def _term_bound(term: Term) -> float | None:
    if isinstance(term, Regions):
        hides = float(term.value) <= -100.0 and term.key_ids is None
        return 0.0 if hides else abs(float(term.value))
    if isinstance(term, RelativeTable):
        return float(term.table.abs().max())
    if isinstance(term, Dense):
        return float(term.bias.abs().max())
    if isinstance(term, LowRank):
        return SLACK * _largest_product(term)
    return None


def _largest_product(term: LowRank) -> float:
    """max |phi_q phi_k^T|, a few rows at a time."""
    phi_q, phi_k = term.masked_phi_q(), term.phi_k.transpose(-1, -2)
    cells = phi_q[..., :1, 0].numel() * phi_k.shape[-1]
    rows = max(1, _PIECE // max(cells, 1))
    pieces = [(part @ phi_k).abs().max() for part in phi_q.split(rows, -2)]
    return float(torch.stack(pieces).max()) if pieces else 0.0

"""Axial terms as factors: the columns of the keys select entries of the queries' rows.

rel_h[i, y[j]] + rel_w[i, x[j]] is the product of the row (rel_h[i], rel_w[i]) with two ones in the
row of key j, which tensor cores add faster than entries are looked up. Entries in half precision
lose nothing but one rounding to fp16 where the scale is no power of two. Entries in fp32 would lose
more, so they are looked up, but in training, where only factors have fast gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..terms import Axial, LowRank, ScoreBias, Term
from .factors import SMALLEST_SCALE

#: What stands for one in the columns of keys. Entries of queries are divided by it, so that fp16
#: holds those that are large, too; a power of two, so nothing is rounded.
ONE = 64.0
#: Larger entries of phi_q, which stand for 16,376 and more, are taken for this: it hides or selects
#: a key as surely, whatever the scale, and fp16 holds it. An infinity would turn zeros into NaN.
LARGEST = 65504 * SMALLEST_SCALE


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection(LowRank):
    """Factors whose phi_k holds `ONE` and zero only, so that they need no balance and no parts."""


def with_selections(bias: ScoreBias, most: int, *, rounded: bool = False) -> ScoreBias:
    """The same bias with those axial terms as factors that have at most `most` columns.

    Args:
        bias: the terms.
        most: columns that the kernel can still take beside the factors of all other terms.
        rounded: whether those whose rows are in fp32, too; they are not rounded here.
    """
    if not any(isinstance(term, Axial) for term in bias.terms):
        return bias
    terms = tuple(_selection(t, most, rounded) for t in bias.terms)
    return dataclasses.replace(bias, terms=terms)


def _selection(term: Term, most: int, rounded: bool) -> Term:
    if not isinstance(term, Axial):
        return term
    parts = [term.rel_h, term.rel_w]
    short = all(p.dtype in (torch.float16, torch.bfloat16) for p in parts)
    if not (short or rounded) or sum(p.shape[-1] for p in parts) > most:
        return term
    lead = torch.broadcast_shapes(*(p.shape[:-1] for p in parts))
    phi_q = torch.cat([p.expand(*lead, p.shape[-1]) for p in parts], -1)
    if term.row_scale is not None:
        phi_q = phi_q.float() * term.row_scale.float()[..., None]
    phi_k = torch.cat([_ones_at(term.y, parts[0]), _ones_at(term.x, parts[1])], -1)
    phi_q = (phi_q / ONE).clamp(-LARGEST, LARGEST)
    return Selection(phi_q=phi_q, phi_k=phi_k[None], split=0, heads=term.heads)


def _ones_at(coordinates: Tensor, rows: Tensor) -> Tensor:
    """(M, columns): `ONE` at each key's coordinate."""
    columns = torch.arange(rows.shape[-1], device=coordinates.device)
    return torch.where(coordinates[:, None] == columns, ONE, 0.0)

"""Where the queries stand among the keys."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..terms import Alibi, Dense, Diagonal, ScoreBias, Term


def place_queries(bias: ScoreBias, n: int, query_start: int | Tensor) -> ScoreBias:
    """Write positions into terms that take them from `query_start`, if it differs by batch entry.

    With an integer start the terms (and the kernels) count by themselves, and nothing changes.

    Args:
        bias: the terms.
        n: number of queries.
        query_start: an int, or integers of shape (*batch).
    """
    if not isinstance(query_start, Tensor):
        return bias
    positions = query_start[..., None] + torch.arange(n, device=query_start.device)

    def place(term: Term) -> Term:
        if isinstance(term, Alibi) and term.pos_q is None:
            return dataclasses.replace(term, pos_q=positions.to(term.slopes.device))
        return term

    return ScoreBias(tuple(place(t) for t in bias.terms), bias.num_heads)


def spread_diagonals(bias: ScoreBias, n: int, m: int, query_start: Tensor) -> ScoreBias:
    """Write diagonals out where they meet other keys in each batch entry.

    A kernel finds the key of a query by itself; a matrix that all entries share cannot.

    Args:
        bias: the terms.
        n, m: number of queries and keys.
        query_start: integers of shape (*batch).
    """
    own = query_start[..., None] + torch.arange(n, device=query_start.device)
    keys = torch.arange(m, device=query_start.device)

    def spread(term: Term) -> Term:
        if not isinstance(term, Diagonal):
            return term
        meets = (keys == own[..., None])[..., None, :, :].to(term.values.device)
        values = term.values[..., None] * meets.to(term.values.dtype)
        return Dense(bias=values, heads=term.heads, row_scale=term.row_scale)

    return ScoreBias(tuple(spread(t) for t in bias.terms), bias.num_heads)

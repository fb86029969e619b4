"""Where the queries stand among the keys."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..terms import Alibi, ScoreBias, Term


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

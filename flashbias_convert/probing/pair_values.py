"""Biases that take few values: a table of distances between the nodes of a graph, looked up."""

from __future__ import annotations

import torch
from torch import Tensor

#: more values than this are no table of distances
MOST_VALUES = 1024
#: pairs that share a value, on average, so that it is no accident
SHARED_BY = 8


def distinct_values(samples: Tensor, hidden: Tensor, tolerance: float) -> int | None:
    """How many values, each a number per head, the pairs of all inputs take; None if too many.

    Values that lie within rounding of each other count as one; those of a head must lie apart by
    more than that.

    Args:
        samples: float64, shape (S, H, N, M), of different inputs.
        hidden: bool, broadcasts to (N, M), pairs that do not count.
        tolerance: how far off a number may be.
    """
    seen = ~hidden.expand(samples.shape[-2:])
    pairs = samples.movedim(1, -1)[:, seen].flatten(0, -2)  # (pairs, H)
    most = min(MOST_VALUES, len(pairs) // SHARED_BY)
    codes = torch.zeros(len(pairs), dtype=torch.long, device=pairs.device)
    for numbers in pairs.unbind(-1):
        groups = _groups(numbers, tolerance)
        if groups is None:
            return None
        both = torch.stack([codes, groups], -1)
        codes = torch.unique(both, dim=0, return_inverse=True)[1]
        if int(codes.max()) >= most:
            return None
    return int(codes.max()) + 1


def _groups(numbers: Tensor, tolerance: float) -> Tensor | None:
    """The group of each number; None if there is a group that is wider than rounding."""
    ordered, order = numbers.sort()
    starts = ordered.diff(prepend=ordered[:1]) > 2 * tolerance
    groups = starts.long().cumsum(0)
    firsts = torch.cat([ordered[:1], ordered[starts]])
    if bool((ordered - firsts[groups] > 2 * tolerance).any()):
        return None
    return torch.empty_like(groups).scatter_(0, order, groups)

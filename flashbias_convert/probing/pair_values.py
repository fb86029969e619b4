"""Biases that take few values: a table of distances between the nodes of a graph, looked up."""

from __future__ import annotations

import torch
from torch import Tensor

#: more values than this are no table of distances
MOST_VALUES = 1024
#: pairs that share a value, on average, so that it is no accident
SHARED_BY = 8


def distinct_values(first: Tensor, second: Tensor, hidden: Tensor, tolerance: float) -> int | None:
    """How many values, each a number per head, the pairs of both inputs take.

    Values that lie within rounding of each other count as one; those of a head must lie apart by
    more than that. Every value occurs with both inputs: it is the table that they share. Samples
    that repeat another, as the rows of triangle attention do, do not count: pairs that are one
    pair share nothing.

    Args:
        first, second: float64, shapes (S, H, N, M) and (S', H, N, M), of two inputs.
        hidden: bool, broadcasts to (N, M), pairs that do not count.
        tolerance: how far off a number may be.

    Returns:
        Their number; None if there are too many, or if the inputs do not share them.
    """
    inputs = [_unrepeated(samples, tolerance) for samples in (first, second)]
    seen = ~hidden.expand(first.shape[-2:])
    parts = [samples.movedim(1, -1)[:, seen].flatten(0, -2) for samples in inputs]  # (pairs, H)
    pairs = torch.cat(parts)
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
    count = int(codes.max()) + 1
    own = codes.split([len(part) for part in parts])
    return count if all(len(part.unique()) == count for part in own) else None


def _unrepeated(samples: Tensor, tolerance: float) -> Tensor:
    """Without samples that are another one up to rounding."""
    kept: list[Tensor] = []
    for sample in samples:
        if not any(bool(((sample - one).abs() <= tolerance).all()) for one in kept):
            kept.append(sample)
    return torch.stack(kept)


def _groups(numbers: Tensor, tolerance: float) -> Tensor | None:
    """The group of each number; None if there is a group that is wider than rounding."""
    ordered, order = numbers.sort()
    starts = ordered.diff(prepend=ordered[:1]) > 2 * tolerance
    groups = starts.long().cumsum(0)
    firsts = torch.cat([ordered[:1], ordered[starts]])
    if bool((ordered - firsts[groups] > 2 * tolerance).any()):
        return None
    return torch.empty_like(groups).scatter_(0, order, groups)

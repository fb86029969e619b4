"""Values between those of a few measured points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def between(points: Sequence[tuple[int, float]], at: float, power: int | None = 1) -> float:
    """A value between those of ascending points, linearly.

    Args:
        points: pairs of place and value, at least one.
        at: the place that is asked for. Before the first it is the first's value, which for times
            is too much rather than too little.
        power: of the growth in proportion beyond the last; None goes on as between the last two.
    """
    (first, least), (last, most) = points[0], points[-1]
    if at <= first:
        return least
    if at >= last and power is not None:
        return most * (at / last) ** power
    if at >= last:
        before, value = points[-2] if len(points) > 1 else (first - 1, least)
        return most + (at - last) * (most - value) / (last - before)
    (x0, low), (x1, high) = next(pair for pair in itertools.pairwise(points) if at <= pair[1][0])
    return low + (at - x0) / (x1 - x0) * (high - low)

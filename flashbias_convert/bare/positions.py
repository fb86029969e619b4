"""Relative positions beyond those of a plain window: class tokens, sides to guess, buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: entries that BEiT's tables have beside those of the window: of the class token
CLASS_TOKEN = 3


def with_class_token(index: Tensor) -> Tensor:
    """BEiT's index: the class token comes first, and its three entries last in the table."""
    n, entries = len(index) + 1, int(index.max()) + 1
    full = torch.empty(n, n, dtype=torch.int64)
    full[1:, 1:] = index
    full[0, :] = entries  # from the class token
    full[:, 0] = entries + 1  # to it
    full[0, 0] = entries + 2
    return full


def sides_of_table(entries: int, given: Sequence[int]) -> tuple[tuple[int, ...], bool] | None:
    """The window that a table belongs to, and whether it has a class token.

    Args:
        entries: of the table.
        given: what the user says; it holds where it fits.

    Returns:
        None where the table is of no square window, and of none that is given.
    """
    for rest, has_class in ((entries, False), (entries - CLASS_TOKEN, True)):
        if given and math.prod(2 * side - 1 for side in given) == rest:
            return tuple(given), has_class
    for rest, has_class in ((entries, False), (entries - CLASS_TOKEN, True)):
        root = math.isqrt(max(rest, 0))
        if root > 1 and root * root == rest and root % 2:
            return ((root + 1) // 2,) * 2, has_class
    return None


def distance_buckets(tokens: int, buckets: int, both: bool, farthest: int = 128) -> Tensor:
    """T5's bucket of every distance: small ones have their own, larger ones share logarithmically.

    Args:
        tokens: N.
        buckets: entries of the table.
        both: whether keys after the query have the upper half; otherwise they count as distance 0.
        farthest: distances from here on share the last bucket; no tensor says it.

    Returns:
        int64, shape (2 N - 1,): the buckets of key minus query = 1 - N, ..., N - 1.
    """
    offset = torch.arange(1 - tokens, tokens)
    start = torch.zeros_like(offset)
    if both:
        buckets //= 2
        start = buckets * (offset > 0)
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    near = buckets // 2
    # in float32, as the models compute it: in float64 some distances fall beside the edge
    ratio = torch.log(distance.float().clamp(min=1) / near) / math.log(farthest / near)
    far = (near + (ratio * (buckets - near)).long()).clamp(max=buckets - 1)
    return start + torch.where(distance < near, distance, far)

"""Relative positions of the tokens of windows and sequences, as integers that look up tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: entries that BEiT's tables have beside those of the window: of the class token
CLASS_TOKEN = 3


def window_index(sides: Sequence[int]) -> Tensor:
    """Query minus key along every axis, the last one fastest (Swin, BEiT, Video Swin).

    Args:
        sides: of the window.

    Returns:
        int64, shape (N, N) with N the product of the sides, into a table with the product of
        ``2 side - 1`` entries.
    """
    axes = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
    n = math.prod(sides)
    index = torch.zeros(n, n, dtype=torch.int64)
    for side, axis in zip(sides, axes, strict=True):
        place = axis.flatten()
        index = index * (2 * side - 1) + place[:, None] - place[None, :] + side - 1
    return index


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


def log_coordinates(sides: Sequence[int]) -> Tensor:
    """What the layers of SwinV2's continuous bias see (SwinV2, section 3.3).

    Args:
        sides: (Wh, Ww).

    Returns:
        float64, shape (1, 2 Wh - 1, 2 Ww - 1, 2): sign(x) log2(1 + |x|) / 3 of offsets x that
        the window scales to [-8, 8].
    """
    axes = [torch.arange(1.0 - side, side, dtype=torch.float64) for side in sides]
    scaled = [8 * axis / max(side - 1, 1) for side, axis in zip(sides, axes, strict=True)]
    grid = torch.stack(torch.meshgrid(*scaled, indexing="ij"), dim=-1)
    return (grid.sign() * torch.log2(1 + grid.abs()) / 3)[None]


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

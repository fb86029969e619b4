"""Heat maps as a few bytes each, so that thousands fit into one page."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: bytes that the maps of all sites may take together, before base64
BUDGET = 24_000_000
#: rows and columns of one map
LARGEST, SMALLEST = 128, 16
#: maps of a head: its bias, its terms, and what they miss
PER_HEAD = 3


def side_and_heads(sites: int, heads: int) -> tuple[int, int]:
    """How large maps may be, and how many heads of a site may have them.

    Args:
        sites: how many sites share the budget.
        heads: how many heads a site has.
    """
    bytes_per_site = BUDGET // max(1, sites)
    side = math.isqrt(bytes_per_site // (PER_HEAD * max(1, heads)))
    most = max(1, bytes_per_site // (PER_HEAD * SMALLEST**2))
    return min(LARGEST, max(SMALLEST, side)), min(heads, most)


def encode_map(matrix: Tensor, side: int, *, extreme: bool = False) -> dict[str, Any]:
    """A matrix as signed steps of its largest value.

    Args:
        matrix: floating point, shape (N, M).
        side: rows and columns at most; larger matrices are reduced block by block.
        extreme: a block becomes its entry of largest size instead of its mean.

    Returns:
        "rows", "cols", "scale", and "data": base64 of int8, each of which times scale / 127 is
        a value.
    """
    small = _reduce(matrix.float(), side, extreme)
    scale = float(small.abs().max())
    steps = (small / (scale or 1.0) * 127).round().to(torch.int8)
    data = base64.b64encode(steps.contiguous().numpy().tobytes()).decode()
    return {"rows": small.shape[0], "cols": small.shape[1], "scale": scale, "data": data}


def _reduce(matrix: Tensor, side: int, extreme: bool) -> Tensor:
    size = (min(matrix.shape[0], side), min(matrix.shape[1], side))
    if size == tuple(matrix.shape):
        return matrix
    if not extreme:
        return F.adaptive_avg_pool2d(matrix[None, None], size)[0, 0]
    high = F.adaptive_max_pool2d(matrix[None, None], size)[0, 0]
    low = -F.adaptive_max_pool2d(-matrix[None, None], size)[0, 0]
    return torch.where(high.abs() >= low.abs(), high, low)

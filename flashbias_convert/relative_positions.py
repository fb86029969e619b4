"""Relative positions in windows: integers that look up tables, and what layers of a bias see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def window_of(module: Any) -> tuple[int, ...]:
    """The sides of a module's `window_size`; one number is that of a square, () means no window."""
    size = module.window_size
    try:
        return (size, size) if isinstance(size, int) else tuple(int(side) for side in size)
    except (TypeError, ValueError):
        return ()


def table_entries(sides: Sequence[int]) -> int:
    """How many offsets there are in a window, each with an entry in its table; 0 in none."""
    return math.prod(2 * side - 1 for side in sides) if sides else 0


def window_index(sides: Sequence[int]) -> Tensor:
    """Query minus key along every axis, the last one fastest (Swin, BEiT, Video Swin).

    Args:
        sides: of the window.

    Returns:
        int64, shape (N, N) with N the product of the sides, into a table of `table_entries`.
    """
    axes = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
    n = math.prod(sides)
    index = torch.zeros(n, n, dtype=torch.int64)
    for side, axis in zip(sides, axes, strict=True):
        place = axis.flatten()
        index = index * (2 * side - 1) + place[:, None] - place[None, :] + side - 1
    return index


def log_coordinates(sides: Sequence[int], trained: Sequence[int] | None = None) -> Tensor:
    """What the layers of SwinV2's continuous bias see (SwinV2, section 3.3).

    Args:
        sides: (Wh, Ww).
        trained: the window that the layers were trained with, if that is another one.

    Returns:
        float64, shape (1, 2 Wh - 1, 2 Ww - 1, 2): sign(x) log2(1 + |x|) / 3 of offsets x that
        the window scales to [-8, 8].
    """
    axes = [torch.arange(1.0 - side, side, dtype=torch.float64) for side in sides]
    spans = [max(side - 1, 1) for side in trained or sides]
    scaled = [8 * axis / span for span, axis in zip(spans, axes, strict=True)]
    grid = torch.stack(torch.meshgrid(*scaled, indexing="ij"), dim=-1)
    return (grid.sign() * torch.log2(1 + grid.abs()) / 3)[None]


def offset_rows(table: Tensor, queries: int, keys: int) -> Tensor:
    """For each query along an axis what belongs to each key, of a table of offsets.

    Args:
        table: shape (2 keys - 1, D): of key minus query, from 1 - keys to keys - 1.
        queries, keys: how many; query 0 stands where key 0 does.

    Returns:
        Shape (queries, keys, D).
    """
    places = torch.arange(max(queries, keys), device=table.device)
    return table[places[:keys] - places[:queries, None] + keys - 1]


def tables_of_offsets(
    embedding: Any, queries: Sequence[int], keys: Sequence[int], scale: float = 1.0
) -> dict[str, Tensor]:
    """`rel_h` and `rel_w` of `axial_rows`, from the tables of timm's `PosEmbedRel`.

    Args:
        embedding: has `height_rel` and `width_rel`, each of shape (2 keys - 1, D).
        queries, keys: rows and columns of the map of each.
        scale: what their products with queries are multiplied by.
    """
    tables = {"rel_h": embedding.height_rel, "rel_w": embedding.width_rel}
    sizes = zip(tables.items(), queries, keys, strict=True)
    found = {name: offset_rows(table, q, k) for (name, table), q, k in sizes}
    return found if scale == 1.0 else {name: scale * rows for name, rows in found.items()}

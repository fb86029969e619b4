"""Launch settings worth measuring for a shape."""

from __future__ import annotations

from dataclasses import replace

from ..attention.launch_table import launch_settings
from ..attention.tuning import LaunchSettings, LaunchShape

#: (queries, keys, warps, caps on registers); the caps let 5, 4, 3 or 2 programs share a
#: multiprocessor of 65,536 registers
Tiles = tuple[tuple[int, int, int, tuple[int | None, ...]], ...]
_NARROW: Tiles = (
    (64, 32, 4, (96, None)),
    (64, 64, 4, (96, 128)),
    (64, 128, 4, (128, 168)),
    (128, 64, 4, (168, None)),
    (128, 64, 8, (128,)),
)
_WIDE: Tiles = (
    (64, 32, 4, (None,)),
    (64, 64, 4, (168, None)),
    (128, 64, 8, (128, None)),
    (128, 128, 8, (None,)),
)
_FEW_QUERIES: Tiles = ((16, 32, 4, (None,)), (16, 64, 4, (None,)), (16, 128, 4, (None,)))
_FP32: Tiles = (
    (16, 32, 4, (None,)),
    (32, 32, 4, (None,)),
    (32, 64, 4, (None,)),
    (64, 32, 4, (None,)),
)
#: for two entries of the batch that share tiles of a dense bias
_TWO_ENTRIES: Tiles = (
    (64, 32, 4, (128, 168)),
    (64, 64, 4, (168,)),
    (128, 32, 4, (None,)),
    (128, 32, 8, (128,)),
    (128, 64, 8, (None,)),
)


def candidates(shape: LaunchShape) -> list[LaunchSettings]:
    """The rule's own settings first, then others."""
    tiles = _NARROW
    if not shape.half:
        tiles = _FP32
    elif shape.n <= 16:
        tiles = _FEW_QUERIES
    elif max(shape.d, shape.dv) > 64 or shape.columns > 64:
        tiles = _WIDE
    rule = launch_settings(shape)
    others = _of_tiles(tiles, shape)
    if shape.shared:
        others += [replace(s, entries=2) for s in _of_tiles(_TWO_ENTRIES, shape)]
    return [rule, *(s for s in others if s != rule)]


def _of_tiles(tiles: Tiles, shape: LaunchShape) -> list[LaunchSettings]:
    return [
        LaunchSettings(m, n, warps, stages, cap)
        for m, n, warps, caps in tiles
        for cap in caps
        for stages in (2, 3)
        if m <= max(64, shape.n) or not shape.half
    ]

"""Work on many matrices a few at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator

#: float64 cells that one chunk may hold: 64 MiB, of which a computation needs a few copies.
CHUNK_CELLS = 2**23


def chunks(count: int, cells: int, budget: int = CHUNK_CELLS) -> Iterator[slice]:
    """Slices that cover `count` matrices of `cells` entries, each slice within `budget`.

    A slice holds at least one matrix, however large that is.
    """
    step = max(1, budget // max(1, cells))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))

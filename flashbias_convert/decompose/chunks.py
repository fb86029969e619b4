"""Work on many matrices a few at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: float64 cells that one chunk may hold on a card: 64 MiB, of which a computation needs a few
#: copies. There many small matrices at once are quicker than one after the other.
CHUNK_CELLS = 2**23
#: The same on a CPU, where they are not: 1 MiB.
CPU_CELLS = 2**17


def chunks(count: int, cells: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `count` matrices of `cells` entries, each slice within a budget.

    A slice holds at least one matrix, however large that is. Where a computation depends on the
    number of matrices in its last bits, its results depend on the kind of device, and on nothing
    else.
    """
    budget = CPU_CELLS if device.type == "cpu" else CHUNK_CELLS
    step = max(1, budget // max(1, cells))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))

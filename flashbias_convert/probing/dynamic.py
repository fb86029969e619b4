"""What a bias that depends on the input looks like: gated rows, sums over axes, linear in q."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..decompose.codes import Grid, grids

#: gates are looked for on grids of at most this many tokens: the search goes row by row
LONGEST_GATED = 1024
#: rows, and cells, in which a dependence on the query is looked for
TRIED = 8


def gated_rows(samples: Tensor, tolerance: float) -> Tensor | None:
    """Rows that are always multiples of one row.

    Args:
        samples: float64, shape (S, H, N, M), zero where hidden; at least two samples.
        tolerance: how far off a number may be.

    Returns:
        The row of each head and query, of length one, shape (H, N, M), or None.
    """
    if len(samples) < 3 or samples.shape[-1] < 3:
        return None  # two rows are too few to tell
    lengths = samples.norm(dim=-1)
    longest = lengths.argmax(0)[None, ..., None].expand(1, *samples.shape[1:])
    row = samples.gather(0, longest)[0]
    row = row / row.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)
    gate = (samples * row).sum(-1, keepdim=True)
    return row if bool(((samples - gate * row).abs() <= tolerance).all()) else None


def gated_offsets(rows: Tensor, tolerance: float) -> tuple[Tensor, Grid] | None:
    """A table of offsets of which every row is a multiple.

    Args:
        rows: shape (H, N, M), of length one.
        tolerance: relative, how far off a number may be.

    Returns:
        A table (H, T) for a grid, up to one factor per head; or None.
    """
    n, m = rows.shape[-2:]
    if max(n, m) > LONGEST_GATED:
        return None
    for grid in grids(n, m):
        table = _chained(rows, grid, tolerance)
        if table is not None:
            return table, grid
    return None


def _chained(rows: Tensor, grid: Grid, tolerance: float) -> Tensor | None:
    """Row after row is scaled so that it agrees with those before where offsets are shared."""
    cells = grid.codes(rows.device).index()
    table = rows.new_zeros(len(rows), grid.size)
    known = torch.zeros(grid.size, dtype=torch.bool, device=rows.device)
    for i, codes in enumerate(cells):
        row, shared = rows[:, i], known[codes]
        if i:
            own, others = row[:, shared], table[:, codes[shared]]
            weight = own.square().sum(-1)
            if not bool((weight > tolerance**2).all()):
                return None
            row = row * ((own * others).sum(-1) / weight)[:, None]
            wrong = (row[:, shared] - others).abs().amax(-1)
            if bool((wrong > tolerance * (1 + row.abs().amax(-1))).any()):
                return None
        table[:, codes[~shared]] = row[:, ~shared]
        known[codes] = True
    return table


def sum_of_axes(samples: Tensor, tolerance: float) -> tuple[int, int, int] | None:
    """Rows that are a number per row of an image plus a number per column.

    Args:
        samples: float64, shape (S, H, N, M).
        tolerance: how far off a number may be.

    Returns:
        Height and width of the key grid, and the number of special tokens in front, 0 or 1.
    """
    for special in (0, 1):
        keys = samples[..., special:]
        for height, width in _images(keys.shape[-1]):
            grid = keys.unflatten(-1, (height, width))
            rest = grid - grid.mean(-1, keepdim=True) - grid.mean(-2, keepdim=True)
            rest = rest + grid.mean((-2, -1), keepdim=True)
            if bool((rest.abs() <= tolerance).all()):
                return height, width, special
    return None


def _images(cells: int) -> Iterator[tuple[int, int]]:
    """Heights and widths, at least two, squares first."""
    found = [(h, cells // h) for h in range(2, cells // 2 + 1) if cells % h == 0]
    yield from sorted(found, key=lambda size: abs(math.log(size[0] / size[1])))


def depends_on(bias: Tensor, q: Tensor | None, k: Tensor | None, tolerance: float) -> str | None:
    """Whether the bias is a linear function of the query, or of query and key.

    Args:
        bias: float64, shape (S, H, N, M), where S counts inputs and their batches.
        q, k: shapes (S, H, N, D) and (S, H, M, D).
        tolerance: how far off a number may be.

    Returns:
        "query", "query and key", or None: neither, or too few samples to tell (they must
        outnumber what is fitted).
    """
    if q is None or len(q) != len(bias):
        return None
    n, m = bias.shape[-2:]
    rows = torch.linspace(0, n - 1, min(n, TRIED)).long().tolist()
    columns = torch.linspace(0, m - 1, min(m, TRIED)).long().tolist()
    if all(_fits(q[:, h, i], bias[:, h, i], tolerance) for h in range(q.shape[1]) for i in rows):
        return "query"
    if k is None or len(k) != len(bias):
        return None
    both = all(
        _fits(torch.cat([q[:, h, i], k[:, h, j]], -1), bias[:, h, i, j, None], tolerance)
        for h in range(q.shape[1])
        for i in rows
        for j in columns
    )
    return "query and key" if both else None


def _fits(given: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether `wanted` (S, X) is a linear function of `given` (S, Y), with samples to spare."""
    given = torch.cat([given.double(), given.new_ones(len(given), 1, dtype=torch.float64)], -1)
    if len(given) <= given.shape[-1]:
        return False
    given, wanted = given.cpu(), wanted.cpu()
    solution = torch.linalg.lstsq(given, wanted, driver="gelsd").solution
    # the fit spreads the rounding of every sample over all of them
    allowed = tolerance * math.sqrt(len(given))
    return bool(((given @ solution - wanted).abs() <= allowed).all())

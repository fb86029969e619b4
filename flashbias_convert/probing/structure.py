"""What a bias that does not depend on the input depends on: nothing, the key, the offset."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decompose.codes import Grid, grids
from ..terms import Alibi, KeyBias, RelativeTable

#: a guess of the grid is first tried on this many rows
TRIED_ROWS = 16


@dataclass(frozen=True, eq=False)
class Pattern:
    """A bias for which one matrix per window type and head stands.

    Attributes:
        bias: floating point, shape (P, H, N, M), P window types; zero where hidden.
        visible: bool, shape (N, M), what at least one query of one window attends to; None means
            everything.
        tolerance: how far apart two numbers may be that the model means to be equal.
    """

    bias: Tensor
    visible: Tensor | None
    tolerance: float

    def spread(self, values: Tensor) -> Tensor:
        """Largest minus smallest visible number of every row of (..., N, M)."""
        if self.visible is None:
            return values.amax(-1) - values.amin(-1)
        high = values.masked_fill(~self.visible, -math.inf).amax(-1)
        low = values.masked_fill(~self.visible, math.inf).amin(-1)
        return (high - low).masked_fill(~self.visible.any(-1), 0)


def is_constant(pattern: Pattern) -> bool:
    """Whether softmax ignores all of it."""
    return bool((pattern.spread(pattern.bias) <= pattern.tolerance).all())


def per_key(pattern: Pattern) -> KeyBias | None:
    """One number per key, up to a constant per row that softmax ignores.

    Returns:
        Values (P, H, M), from the row that sees most keys.
    """
    row = 0 if pattern.visible is None else int(pattern.visible.sum(-1).argmax())
    values = pattern.bias[..., row, :]
    rest = pattern.bias - values[..., None, :]
    if pattern.visible is not None:
        if bool((pattern.visible & ~pattern.visible[row]).any()):
            return None  # no row sees all of them
        rest = rest.masked_fill(~pattern.visible, 0)
    if bool((pattern.spread(rest) > pattern.tolerance).any()):
        return None
    return KeyBias(values=values.float().contiguous())


def slopes_of(term: KeyBias, pattern: Pattern) -> Alibi | None:
    """ALiBi, if the values rise evenly from key to key and are the same for all windows."""
    values = term.values.double()
    if values.shape[0] != 1 or values.shape[-1] < 3:
        return None
    slopes = (values[0, :, -1] - values[0, :, 0]) / (values.shape[-1] - 1)
    keys = torch.arange(values.shape[-1], device=values.device, dtype=torch.float64)
    rest = values[0] - slopes[:, None] * keys
    even = rest.amax(-1) - rest.amin(-1) <= pattern.tolerance
    return Alibi(slopes=slopes.float()) if bool(even.all()) else None


def by_offset(pattern: Pattern) -> tuple[RelativeTable, Grid] | None:
    """One number per offset of key and query on a grid, with or without a special token.

    Returns:
        The smallest table that holds all visible cells, (P, H, T), and its grid.
    """
    n, m = pattern.bias.shape[-2:]
    rows = torch.linspace(0, n - 1, min(n, TRIED_ROWS), device=pattern.bias.device).long()
    for grid in grids(n, m):
        codes = grid.codes(pattern.bias.device)
        cells = codes.index()
        if _table(pattern, cells, grid.size, rows) is None:
            continue
        table = _table(pattern, cells, grid.size, torch.arange(n, device=rows.device))
        if table is not None:
            return RelativeTable.of_codes(table.float(), codes.u.int(), codes.v.int()), grid
    return None


def _table(pattern: Pattern, cells: Tensor, size: int, rows: Tensor) -> Tensor | None:
    """(P, H, size), or None where cells of one code differ."""
    flat = pattern.bias[..., rows, :].flatten(-2)
    codes = cells[rows].flatten()
    if pattern.visible is not None:
        seen = pattern.visible[rows].flatten()
        flat, codes = flat[..., seen], codes[seen]
    index = codes.expand(flat.shape)
    start = flat.new_zeros(*flat.shape[:-1], size)
    high = start.scatter_reduce(-1, index, flat, "amax", include_self=False)
    low = start.scatter_reduce(-1, index, flat, "amin", include_self=False)
    return high if bool((high - low <= pattern.tolerance).all()) else None


def symmetric_slopes(term: RelativeTable, grid: Grid, pattern: Pattern) -> Alibi | None:
    """ALiBi of both directions: minus a slope times the distance."""
    one_line = len(grid.queries) == 1 and not grid.special and grid.queries == grid.keys
    if not one_line or term.table.shape[0] != 1 or pattern.visible is not None:
        return None
    n = grid.queries[0]
    table = term.table[0].double()
    distance = (torch.arange(2 * n - 1, device=table.device) - (n - 1)).abs().double()
    level = table[:, n - 1 : n]
    slopes = (level - table[:, :1]) / max(n - 1, 1)
    rest = (table - level + slopes[..., :] * distance).abs()
    even = bool((rest <= pattern.tolerance).all()) and bool((slopes > 0).all())
    return Alibi(slopes=slopes[:, 0].float(), symmetric=True) if even else None


def named(grid: Grid) -> str:
    """A grid in words."""
    queries = " x ".join(map(str, grid.queries))
    keys = "" if grid.keys == grid.queries else f" against {' x '.join(map(str, grid.keys))}"
    behind = " behind one special token" if grid.special else ""
    if len(grid.queries) == 1:
        return f"1-D offsets{keys and f', {queries}{keys}'}{behind}"
    return f"{len(grid.queries)}-D offsets, {queries}{keys}{behind}"

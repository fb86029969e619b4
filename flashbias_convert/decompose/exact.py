"""Terms that keep every bit of a bias: found by looking, accepted only if they reproduce it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..terms import Dense, Regions, RelativeTable
from ..terms.regions import are_in_twos
from ..terms.relative_table import distance_direction
from .chunks import chunks
from .codes import Codes, check_index, codes_from_index, grids

#: tokens from which on a table of distances gets the margin that a kernel for them needs
LONG_ENOUGH = 4 * RelativeTable.MARGIN

#: A guess is first tried on this many rows of this many matrices: almost every wrong one fails.
PROBE_ROWS, PROBE_MATRICES = 16, 32


# -- no term at all ------------------------------------------------------------------------


@torch.no_grad()
def is_row_constant(bias: Tensor, visible: Tensor | None = None) -> Tensor:
    """Whether softmax ignores the bias: every row holds one value, exactly.

    Args:
        bias: floating point, shape (*batch, H, N, M).
        visible: bool, shape (N, M), True where a query attends to a key; hidden cells may hold
            anything.

    Returns:
        bool, shape (*batch, H). NaN is never constant.
    """
    if visible is None:
        return (bias.amax(-1) == bias.amin(-1)).all(-1)
    visible = visible.to(bias.device)
    high = bias.masked_fill(~visible, -math.inf).amax(-1)
    low = bias.masked_fill(~visible, math.inf).amin(-1)
    return ((high == low) | ~visible.any(-1)).all(-1)


# -- relative tables -----------------------------------------------------------------------


@torch.no_grad()
def relative_table(
    bias: Tensor, index: Tensor | None = None, *, name: str = ""
) -> RelativeTable | None:
    """Recognise a bias of the relative position: bias[h, i, j] == table[h, u[i] + v[j]].

    With an index matrix its own structure is used, including a first row and column of a special
    token. Otherwise, and where the index is not additive (LeViT's absolute offsets, T5's
    buckets), grids are tried: every 1-D, 2-D and 3-D shape, with and without one special token
    in front. The smallest table wins.

    Args:
        bias: floating point, shape (*batch, H, N, M). All matrices share the codes.
        index: integers, shape (N, M) or flattened: the model's own relative position index.
        name: the site, for error messages.

    Returns:
        A term for all heads with an fp32 table (*batch, H, T) and int32 codes that reproduces the
        bias bit for bit (0.0 and -0.0 count as one value), or None. A float64 bias that fp32
        cannot hold gives None.

    Raises:
        DecompositionError: an index that is out of range or has the wrong shape.
    """
    n, m = bias.shape[-2:]
    if index is not None:
        codes = codes_from_index(check_index(index, n, m, name=name).to(bias.device))
        term = None if codes is None else _tabulate(bias, codes)
        if term is not None:
            return term
    found = (_tabulate(bias, codes) for codes in _plausible(bias))
    return next((term for term in found if term is not None), None)


def _plausible(bias: Tensor) -> Iterator[Codes]:
    """Guesses that hold on a few rows of a few matrices, smallest table first."""
    n, m = bias.shape[-2:]
    flat = bias.reshape(-1, n, m)
    rows = _spread(n, PROBE_ROWS, bias.device)
    probe = flat[_spread(len(flat), PROBE_MATRICES, bias.device)][:, rows].flatten(1)
    for grid in grids(n, m):
        codes = grid.codes(bias.device)
        cell_code = (codes.u[rows, None] + codes.v).flatten()
        first = _first_cells(cell_code, grid.size)
        if torch.equal(probe, probe[:, first[cell_code]]):
            yield codes


def _spread(count: int, wanted: int, device: torch.device) -> Tensor:
    """Up to `wanted` positions spread over range(count)."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device).long()


def _first_cells(cell_code: Tensor, size: int) -> Tensor:
    """For each code the first cell that has it; the number of cells where none does."""
    cells = torch.arange(len(cell_code), device=cell_code.device)
    none = cells.new_full((size,), len(cell_code))
    return none.scatter_reduce(0, cell_code, cells, "amin")


def _tabulate(bias: Tensor, codes: Codes) -> RelativeTable | None:
    """Fill the table from the bias; None unless it gives the bias back."""
    cell_code, size = codes.index().flatten(), codes.size
    first = _first_cells(cell_code, size)
    used = first < len(cell_code)
    flat = bias.reshape(-1, len(cell_code))
    table = flat.new_zeros(len(flat), size, dtype=torch.float32)
    table[:, used] = flat[:, first[used]].float()
    for part in chunks(len(flat), len(cell_code), bias.device):
        if not torch.equal(table[part][:, cell_code].to(bias.dtype), flat[part]):
            return None
    long = min(len(codes.u), len(codes.v)) >= LONG_ENOUGH
    return RelativeTable.of_codes(
        table.reshape(*bias.shape[:-2], size),
        codes.u.int(),
        codes.v.int(),
        distance_direction(codes.u, codes.v) if long else 0,
    )


# -- regions -------------------------------------------------------------------------------


@torch.no_grad()
def regions(mask: Tensor) -> Regions | None:
    """Recognise an additive mask that separates regions, such as Swin's shift mask.

    Args:
        mask: floating point, shape (*batch, N, M): 0 where tokens of one region meet, one finite
            value everywhere else, at least once each. For windows (nW, N, N).

    Returns:
        Region ids, int32 (*batch, N) and, where the keys' differ, (*batch, M), which reproduce
        the mask; None if it is of another form: causal, infinite, of three values, all zero.
    """
    if not mask.is_floating_point() or mask.dim() < 2 or not mask.numel():
        return None
    away = mask != 0
    value = float(mask[away][0]) if away.any() else 0.0
    two_valued = ((mask == value) | ~away).all() and not away.all()
    if value == 0.0 or not math.isfinite(value) or not two_valued:
        return None
    ids, key_ids = _region_ids(~away)
    if not torch.equal(ids[..., :, None] != key_ids[..., None, :], away):
        return None
    shared = ids.shape == key_ids.shape and torch.equal(ids, key_ids)
    twos = are_in_twos(key_ids)
    return Regions(ids=ids, key_ids=None if shared else key_ids, value=value, pairs=twos)


def _region_ids(together: Tensor) -> tuple[Tensor, Tensor]:
    """Ids from 0 on for rows and columns, if `together` (*batch, N, M) is made of blocks."""
    n = together.shape[-2]
    # a block is named by its first row: the first row that a column meets ...
    first_row = together.byte().argmax(-2)
    key_ids = first_row.where(together.any(-2), torch.full_like(first_row, n))
    # ... and, for a row, that of the first column it meets; a row that meets none is alone
    first_column = together.byte().argmax(-1)
    ids = key_ids.gather(-1, first_column)
    ids = ids.where(together.any(-1), torch.full_like(ids, n + 1))
    seen = torch.zeros(*together.shape[:-2], n + 2, dtype=torch.int64, device=together.device)
    seen = seen.scatter(-1, ids, 1).scatter(-1, key_ids, 1)
    small = (seen.cumsum(-1) - 1).int()
    return small.gather(-1, ids), small.gather(-1, key_ids)


# -- the fallback --------------------------------------------------------------------------


def dense_term(bias: Tensor, heads: tuple[int, ...] | None = None) -> Dense:
    """The bias as it is, shape (*batch, H, N, M): always exact, in its own dtype.

    Args:
        bias: the matrices of the heads that the term acts on.
        heads: which heads these are; None means all.
    """
    # a copy: the bias may be a parameter that the model keeps, and saves, under its own name
    return Dense(bias=bias.detach().clone(memory_format=torch.contiguous_format), heads=heads)

"""Device functions that the backward kernels share: reading rows, scores, weights.

A tile is made from row indices `i` and key indices `j` whose shapes broadcast, (BM, 1) and (1, BN)
or (1, BM) and (BN, 1): the same functions make it upright and transposed. Both are indices of
valid rows and keys, 64-bit; what they stand for beyond the ends is masked by `hide`.
Scores are in natural units here. What is particular to terms is in `triton_terms`.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import factors

LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST_SCALE = tl.constexpr(factors.SMALLEST_SCALE)


class Walk(NamedTuple):
    """A tensor with its strides: batch 0, 1, 2, then its own dimensions."""

    ptr: Any
    strides: Any


class Terms(NamedTuple):
    """What a group's bias consists of; names as in `packing`, None for what is absent."""

    heads: Any = None
    phi_q: Any = None
    phi_k: Any = None
    phi_q_rounded: Any = None
    phi_k_rounded: Any = None
    key_bias: Any = None
    key_bias_rows: Any = None
    slopes: Any = None
    alibi_rows: Any = None
    pos_q: Any = None
    pos_k: Any = None
    table: Any = None
    table_rows: Any = None
    codes_q: Any = None
    codes_k: Any = None
    ids: Any = None
    key_ids: Any = None
    region_rows: Any = None
    dense: Any = None
    dense_rows: Any = None
    diagonal: Any = None
    lookup: Any = None
    lookup_rows: Any = None
    lookup_code: Any = None
    rel_h: Any = None
    rel_w: Any = None
    axial_y: Any = None
    axial_x: Any = None


class Call(NamedTuple):
    """q, k, v and everything else that a call has beside its bias.

    With cosine attention q and k are normalised, and raw_q and raw_k are what they were before.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    raw_q: Any = None
    raw_k: Any = None
    key_mask: Any = None
    starts: Any = None
    scale: Any = None


class Entries(NamedTuple):
    """How programs share out the batch: kept dimensions by program, the others in a loop.

    Gradients of tensors that the batch shares are summed in that loop. It is cut into splits of
    `per_split` entries, whose sums the host adds.
    """

    kept: Any
    kept_1: Any
    kept_2: Any
    looped: Any
    looped_1: Any
    looped_2: Any
    per_split: Any


@triton.jit
def batch_entry(entries, kept, looped):
    """Indices along the three batch dimensions."""
    b0 = kept // entries.kept_2 // entries.kept_1 + looped // entries.looped_2 // entries.looped_1
    b1 = (kept // entries.kept_2) % entries.kept_1 + (looped // entries.looped_2) % entries.looped_1
    b2 = kept % entries.kept_2 + looped % entries.looped_2
    return b0, b1, b2


@triton.jit
def places(first, count, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Numbers of a tile's rows or keys, which of them there are, and, as 64 bits, where to read.

    WHOLE says that all are there: constants, so that nothing is left of masks.
    """
    found = first + tl.arange(0, SIZE)
    if WHOLE:
        return found, tl.full([SIZE], 1, tl.int1), found.to(tl.int64)
    else:
        return found, found < count, tl.minimum(found, count - 1).to(tl.int64)


@triton.jit
def at(walk, b):
    """Pointer to one batch entry; 64-bit, since offsets may pass 2**31."""
    return (
        walk.ptr
        + b[0].to(tl.int64) * walk.strides[0]
        + b[1].to(tl.int64) * walk.strides[1]
        + b[2].to(tl.int64) * walk.strides[2]
    )


@triton.jit
def head(walk, b, h):
    """Pointer to one head of one batch entry."""
    return at(walk, b) + h.to(tl.int64) * walk.strides[3]


@triton.jit
def cells(walk, b, h, rows, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to whole rows of a matrix, (len(rows), BLOCK).

    ALIGNED says that rows begin at multiples of 16 bytes; the compiler sees that of strides that
    are multiples of 16 only, and would read rows of 40 or 72 numbers one by one.
    """
    columns = tl.arange(0, BLOCK).to(tl.int64)
    start = head(walk, b, h)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + rows[:, None] * row_step(walk, ALIGNED) + columns[None, :] * walk.strides[5]


@triton.jit
def row_step(walk, ALIGNED: tl.constexpr):
    """From a row of a matrix to the next, with what `cells` knows of it."""
    step = walk.strides[4]
    if ALIGNED:
        step = step // 8 * 8 if walk.ptr.dtype.element_ty != tl.float32 else step // 4 * 4
    return step


@triton.jit
def rows_from(
    tile, first, walk, inside,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr = False,
):  # fmt: skip
    """`rows_of` for rows from `first` on, given the `cells` of those from 0 on: a loop has them
    ready, and one number to add."""
    columns = tl.arange(0, BLOCK)
    mask = inside[:, None] if SIZE == BLOCK else inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(tile + tl.cast(first, tl.int64) * row_step(walk, ALIGNED), mask=mask, other=0.0)


@triton.jit
def rows_of(
    walk, b, h, rows, inside,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr = False,
):  # fmt: skip
    """Rows of a matrix, (len(rows), BLOCK); zeros outside."""
    columns = tl.arange(0, BLOCK)
    mask = inside[:, None] if SIZE == BLOCK else inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(cells(walk, b, h, rows, BLOCK, ALIGNED), mask=mask, other=0.0)


@triton.jit
def store_rows(
    walk, b, h, rows, inside, x,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write what `rows_of` would read."""
    mask = inside[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :]
    where = cells(walk, b, h, rows, BLOCK, ALIGNED)
    tl.store(where, x.to(walk.ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(
    walk, b, h, rows, inside, x,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add to what `rows_of` would read, beside other programs that do."""
    mask = inside[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :]
    tl.atomic_add(cells(walk, b, h, rows, BLOCK, ALIGNED), x, mask=mask, sem="relaxed")


@triton.jit
def first_key(c, b, query_start):
    """The key that query 0 stands at."""
    start = query_start
    if c.starts is not None:
        start = tl.load(at(c.starts, b)).to(tl.int32)
    return start


@triton.jit
def parts_of_scale(c, scale, h):
    """The scale, and the unit that packed factors are divided by; see the forward kernel."""
    if c.scale is not None:
        scale = tl.load(c.scale + h)
    size = tl.where(tl.abs(scale) < SMALLEST_SCALE, 1.0, tl.abs(scale))
    return scale, size


@triton.jit
def with_sign(x, scale, size, SIGNED: tl.constexpr):
    """Rows of q or k with the sign of the scale, as the forward kernel has it in q: exact, and no
    multiplication of each score. A tiny scale goes there whole, and is rounded there."""
    if SIGNED:
        return (x * (scale / size)).to(x.dtype)
    else:
        return x


@triton.jit
def scores(
    qk, left, right, scale, size,
    COLUMNS: tl.constexpr, NATURAL: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """scale * q k + phi_q phi_k, in units of `unit_of`, summed in the order of the forward pass.

    In fp32 factors are not divided by the scale's size. SIGNED says that `qk` has its sign.
    """
    if COLUMNS == 0:
        return qk
    elif NATURAL:
        return tl.dot(left, tl.trans(right), qk * scale, input_precision="ieee")
    elif SIGNED:
        return tl.dot(left, tl.trans(right), qk, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), qk * (scale / size), input_precision="ieee")


@triton.jit
def unit_of(scale, size, COLUMNS: tl.constexpr, NATURAL: tl.constexpr):
    """What `scores` are multiples of: where no other term is added, a multiplication less."""
    if COLUMNS == 0:
        return scale
    elif NATURAL:
        return 1.0
    else:
        return size


@triton.jit
def hide(
    p, c, b, rows, keys, j, start, M,
    WHOLE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Weights, or zero where a query must not attend. Rows beyond the end need no mask: they are
    read with an infinite level. WHOLE says that tiles divide the keys."""
    if not WHOLE:
        p = tl.where(keys < M, p, 0.0)
    if CAUSAL:
        p = tl.where(keys <= start + rows, p, 0.0)
    if c.key_mask is not None:
        visible = tl.load(at(c.key_mask, b) + j * c.key_mask.strides[3])
        p = tl.where(visible != 0, p, 0.0)
    return p


@triton.jit
def row_sums(c, b, h, rows, inside, NATURAL: tl.constexpr):
    """Level and share of some rows, see `weights`, and delta."""
    at_rows = head(c.lse, b, h) + rows * c.lse.strides[4]
    level = tl.load(at_rows, mask=inside, other=float("inf"))
    share = level
    if NATURAL:
        share = tl.load(at_rows + c.lse.strides[5], mask=inside, other=0.0)
    delta = tl.load(head(c.delta, b, h) + rows * c.delta.strides[4], mask=inside, other=0.0)
    return level, share, delta


@triton.jit
def weights(x, unit, level, share, NATURAL: tl.constexpr):
    """Softmax again: in fp32 from the same differences as in the forward pass, in half precision
    from levels to base 2 that hold the sum of the row."""
    if NATURAL:
        return tl.exp2((x * unit - level) * LOG2E) * share
    else:
        return tl.exp2(x * (unit * LOG2E) - level)


@triton.jit
def through_length(gradient, raw):
    """The gradient of rows, given that of the same rows scaled to unit length."""
    raw = raw.to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(raw * raw, 1)), 1e-12)
    unit = raw / length[:, None]
    along = tl.sum(unit * gradient, 1)
    return (gradient - unit * along[:, None]) / length[:, None]


@triton.jit
def store_shared(ptr, slot, G, g, N, rows, inside, x):
    """One number per row, into (slots, G, N)."""
    tl.store(ptr + (slot.to(tl.int64) * G + g) * N + rows, x, mask=inside)


@triton.jit
def store_columns(
    ptr, slot, G, g, N, rows, inside, x, SIZE: tl.constexpr, BLOCK: tl.constexpr, first=0
):  # fmt: skip
    """A row of columns each, into (slots, G, N, SIZE) from column `first` on."""
    columns = first + tl.arange(0, BLOCK)
    ptr += (slot.to(tl.int64) * G + g) * N * SIZE
    mask = inside[:, None] & (columns < SIZE)[None, :]
    tl.store(ptr + rows[:, None] * SIZE + columns[None, :], x, mask=mask)

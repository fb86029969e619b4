"""Device functions of the backward kernels: one tile of each kind of term.

Indices `i` of rows and `j` of keys are as in `triton_tiles`; `keys` may lie past the end, too. A
term's tile comes without its row scale.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import at, head


@triton.jit
def gate(tile, rows, b, g, i):
    """A tile times the row scale of its term."""
    if rows is not None:
        tile = tile * tl.load(head(rows, b, g) + i * rows.strides[4])
    return tile


@triton.jit
def key_tile(t, b, g, j):
    return tl.load(head(t.key_bias, b, g) + j * t.key_bias.strides[4])


@triton.jit
def alibi_tile(t, b, g, i, j, start, SYMMETRIC: tl.constexpr):
    slope = tl.load(at(t.slopes, b) + g * t.slopes.strides[3])
    query = start + i.to(tl.int32)
    key = j.to(tl.int32)
    if t.pos_q is not None:
        query = tl.load(at(t.pos_q, b) + i * t.pos_q.strides[3])
    if t.pos_k is not None:
        key = tl.load(at(t.pos_k, b) + j * t.pos_k.strides[3])
    distance = (key - query).to(tl.float32)
    if SYMMETRIC:
        distance = -tl.abs(distance)
    return slope * distance


@triton.jit
def table_tile(t, b, g, i, j):
    code = tl.load(t.codes_q + i) + tl.load(t.codes_k + j)
    return tl.load(head(t.table, b, g) + code)


@triton.jit
def region_tile(t, b, i, j, value):
    query = tl.load(at(t.ids, b) + i * t.ids.strides[3])
    key = tl.load(at(t.key_ids, b) + j * t.key_ids.strides[3])
    return tl.where(query == key, 0.0, value)


@triton.jit
def dense_tile(t, b, g, i, keys, M):
    # not at valid keys only, as all else: of those the compiler does not know that they follow one
    # another, and it would read numbers one by one
    where = i * t.dense.strides[4] + keys.to(tl.int64) * t.dense.strides[5]
    return tl.load(head(t.dense, b, g) + where, mask=keys < M, other=0.0).to(tl.float32)


@triton.jit
def lookup_tile(t, b, g, i, j):
    where = i * t.lookup_code.strides[3] + j * t.lookup_code.strides[4]
    return tl.load(head(t.lookup, b, g) + tl.load(at(t.lookup_code, b) + where))


@triton.jit
def axial_tile(t, b, g, i, j):
    rows = tl.load(head(t.rel_h, b, g) + i * t.rel_h.strides[4] + tl.load(t.axial_y + j))
    columns = tl.load(head(t.rel_w, b, g) + i * t.rel_w.strides[4] + tl.load(t.axial_x + j))
    return rows.to(tl.float32) + columns.to(tl.float32)


@triton.jit
def add_terms(x, t, b, g, i, j, keys, start, region_value, M, SYMMETRIC: tl.constexpr):
    """Scores plus every term that is added element by element."""
    if t.key_bias is not None:
        x += gate(key_tile(t, b, g, j), t.key_bias_rows, b, g, i)
    if t.slopes is not None:
        x += gate(alibi_tile(t, b, g, i, j, start, SYMMETRIC), t.alibi_rows, b, g, i)
    if t.table is not None:
        x += gate(table_tile(t, b, g, i, j), t.table_rows, b, g, i)
    if t.ids is not None:
        x += gate(region_tile(t, b, i, j, region_value), t.region_rows, b, g, i)
    if t.dense is not None:
        x += gate(dense_tile(t, b, g, i, keys, M), t.dense_rows, b, g, i)
    if t.diagonal is not None:
        own = tl.load(head(t.diagonal, b, g) + i * t.diagonal.strides[4])
        x += tl.where(j == start + i, own, 0.0)
    if t.lookup is not None:
        x += gate(lookup_tile(t, b, g, i, j), t.lookup_rows, b, g, i)
    if t.rel_h is not None:
        x += axial_tile(t, b, g, i, j)
    return x

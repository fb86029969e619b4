"""The Triton kernels of the backward pass, after FlashAttention-2.

Scores are computed again from q, k and the terms; with the log-sum-exp of each row, in two parts,
they give the weights p, and with delta = sum(out * dout) ds = p * (dout v^T - delta). The kernel
here walks the keys of a block of queries, that of `triton_keys` the queries of a block of keys;
what depends on pairs is in `triton_pairs`. No kernel adds to memory that another program writes:
sums over the batch run inside a program, in a fixed order, so the same call gives the same bits.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .triton_terms import (
    add_terms,
    alibi_tile,
    dense_tile,
    key_tile,
    lookup_tile,
    region_tile,
    table_tile,
)
from .triton_tiles import (
    batch_entry,
    cells,
    first_key,
    head,
    hide,
    parts_of_scale,
    places,
    row_sums,
    rows_from,
    rows_of,
    scores,
    store_columns,
    store_rows,
    store_shared,
    through_length,
    unit_of,
    weights,
    with_sign,
)


class QueryGradients(NamedTuple):
    """Where `query_gradients_kernel` writes; None for what is not wanted.

    dq is a `Walk`; all others are contiguous fp32, (splits, kept entries, G, N) and then columns,
    of which a launch writes those of rel_h and rel_w from `first_column` on.
    """

    dq: Any = None
    scale: Any = None
    phi_q: Any = None
    key_bias_rows: Any = None
    alibi_rows: Any = None
    table_rows: Any = None
    region_rows: Any = None
    dense_rows: Any = None
    lookup_rows: Any = None
    diagonal: Any = None
    rel_h: Any = None
    rel_w: Any = None


@triton.jit
def delta_kernel(
    o, do, delta, entries, H, N,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta[i] = sum(out[i] * dout[i]) in fp32, for every head."""
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    h = (pid // blocks) % H
    b = batch_entry(entries, pid // blocks // H, 0)
    rows = ((pid % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    left = rows_of(o, b, h, rows, inside, DV, BLOCK_DV).to(tl.float32)
    right = rows_of(do, b, h, rows, inside, DV, BLOCK_DV).to(tl.float32)
    tl.store(head(delta, b, h) + rows * delta.strides[4], tl.sum(left * right, 1), mask=inside)


@triton.jit(do_not_specialize=["query_start"])
def query_gradients_kernel(
    c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M, first_column,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_KH: tl.constexpr, BLOCK_KW: tl.constexpr,
    CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr, NATURAL: tl.constexpr,
    ADDED: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq, and the gradients of what belongs to queries; a program has one block of queries."""
    blocks = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    first = pid % blocks * BM
    g = (pid // blocks) % G
    slot = pid // blocks // G
    kept = slot % entries.kept
    h = g
    if t.heads is not None:
        h = tl.load(t.heads + g)
    h_kv = h // kv_group
    scale, size = parts_of_scale(c, scale, h)
    unit = unit_of(scale, size, COLUMNS, NATURAL)
    GRAD: tl.constexpr = c.do.ptr.dtype.element_ty
    # a gradient of the scale is made of products without it
    SIGNED: tl.constexpr = COLUMNS > 0 and not NATURAL and out.scale is None
    # two loops take more registers than one, and terms leave few: only where half is hidden
    SPLIT: tl.constexpr = CAUSAL or not (WHOLE or ADDED)

    rows = first + tl.arange(0, BM)
    inside = rows < N
    safe_rows = tl.minimum(rows, N - 1).to(tl.int64)
    i = safe_rows[:, None]

    d_phi = tl.zeros([BM, COLUMNS if COLUMNS > 0 else 16], tl.float32)
    d_scale = tl.zeros([BM], tl.float32)
    d_key = tl.zeros([BM], tl.float32)
    d_alibi = tl.zeros([BM], tl.float32)
    d_table = tl.zeros([BM], tl.float32)
    d_region = tl.zeros([BM], tl.float32)
    d_dense = tl.zeros([BM], tl.float32)
    d_lookup = tl.zeros([BM], tl.float32)
    d_diagonal = tl.zeros([BM], tl.float32)
    d_high = tl.zeros([BM, BLOCK_KH], tl.float32)
    d_wide = tl.zeros([BM, BLOCK_KW], tl.float32)
    high = (first_column + tl.arange(0, BLOCK_KH))[None, :]
    wide = (first_column + tl.arange(0, BLOCK_KW))[None, :]

    lower = slot // entries.kept * entries.per_split
    for e in tl.range(lower, tl.minimum(lower + entries.per_split, entries.looped)):
        b = batch_entry(entries, kept, e)
        start = first_key(c, b, query_start)
        q = rows_of(c.q, b, h, safe_rows, inside, D, BLOCK_D, ALIGNED)
        q = with_sign(q, scale, size, SIGNED)
        do = rows_of(c.do, b, h, safe_rows, inside, DV, BLOCK_DV, ALIGNED)
        level, share, delta = row_sums(c, b, h, safe_rows, inside, NATURAL)
        phi_q = 0.0
        if COLUMNS > 0:
            phi_q = rows_of(t.phi_q, b, g, safe_rows, inside, COLUMNS, COLUMNS)
        d_q = tl.zeros([BM, BLOCK_D], tl.float32)
        from_0 = tl.arange(0, BN).to(tl.int64)
        k_tile = cells(c.k, b, h_kv, from_0, BLOCK_D, ALIGNED)
        v_tile = cells(c.v, b, h_kv, from_0, BLOCK_DV, ALIGNED)
        phi_tile = 0.0
        rounded_tile = 0.0
        if COLUMNS > 0:
            phi_tile = cells(t.phi_k, b, g, from_0, COLUMNS, False)
            if t.phi_k_rounded is not None:
                rounded_tile = cells(t.phi_k_rounded, b, g, from_0, COLUMNS, False)
        # Tiles of keys that are whole, and seen by all rows, come first: they need no masks.
        full = M // BN * BN if SPLIT else M
        end = M
        if CAUSAL:
            end = tl.maximum(tl.minimum(M, start + first + BM), 0)
            full = tl.minimum(full, tl.maximum(start + first + 1, 0) // BN * BN)
        for PASS in tl.static_range(2 if SPLIT else 1):
            for s in tl.range(full if PASS == 1 else 0, end if PASS == 1 else full, BN):
                keys, in_keys, safe_keys = places(s, M, BN, WHOLE or (SPLIT and PASS == 0))
                j = safe_keys[None, :]
                k = rows_from(k_tile, s, c.k, in_keys, D, BLOCK_D, ALIGNED)
                v = rows_from(v_tile, s, c.v, in_keys, DV, BLOCK_DV, ALIGNED)
                qk = tl.dot(q, tl.trans(k), input_precision="ieee")
                # asked for before weights are made, so that the tensor cores work meanwhile
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                phi_k = 0.0
                if COLUMNS > 0:
                    phi_k = rows_from(phi_tile, s, t.phi_k, in_keys, COLUMNS, COLUMNS)
                x = scores(qk, phi_q, phi_k, scale, size, COLUMNS, NATURAL, SIGNED)
                if ADDED:
                    x = add_terms(
                        x * unit, t, b, g, i, j, keys[None, :], start, region_value, M, SYMMETRIC
                    )
                p = weights(x, 1.0 if ADDED else unit, level[:, None], share[:, None], NATURAL)
                p = hide(
                    p, c, b, rows[:, None], keys[None, :], j, start, M,
                    WHOLE or (SPLIT and PASS == 0), CAUSAL and PASS == 1,
                )  # fmt: skip
                ds = p * (dp - delta[:, None])

                short = ds.to(GRAD)
                if out.dq is not None:
                    d_q = tl.dot(short, k.to(GRAD), d_q, input_precision="ieee")
                if out.phi_q is not None:
                    if t.phi_k_rounded is not None:
                        phi_k = rows_from(
                            rounded_tile, s, t.phi_k_rounded, in_keys, COLUMNS, COLUMNS
                        )
                    d_phi = tl.dot(short, phi_k.to(GRAD), d_phi, input_precision="ieee")
                if out.scale is not None:
                    d_scale += tl.sum(ds * qk, 1)
                if out.key_bias_rows is not None:
                    d_key += tl.sum(ds * key_tile(t, b, g, j), 1)
                if out.alibi_rows is not None:
                    d_alibi += tl.sum(ds * alibi_tile(t, b, g, i, j, start, SYMMETRIC), 1)
                if out.table_rows is not None:
                    d_table += tl.sum(ds * table_tile(t, b, g, i, j), 1)
                if out.region_rows is not None:
                    d_region += tl.sum(ds * region_tile(t, b, i, j, region_value), 1)
                if out.dense_rows is not None:
                    d_dense += tl.sum(ds * dense_tile(t, b, g, i, keys[None, :], M), 1)
                if out.lookup_rows is not None:
                    d_lookup += tl.sum(ds * lookup_tile(t, b, g, i, j), 1)
                if out.diagonal is not None:
                    meets = keys[None, :] == (start + rows)[:, None]
                    d_diagonal += tl.sum(tl.where(meets, ds, 0.0), 1)
                if out.rel_h is not None:
                    # a product with ones where a key has a coordinate: sums of ds by coordinate
                    y = tl.load(t.axial_y + safe_keys)[:, None] == high
                    d_high = tl.dot(short, y.to(GRAD), d_high, input_precision="ieee")
                if out.rel_w is not None:
                    y = tl.load(t.axial_x + safe_keys)[:, None] == wide
                    d_wide = tl.dot(short, y.to(GRAD), d_wide, input_precision="ieee")

        if out.dq is not None:
            d_q = d_q * scale
            if COSINE:
                raw = rows_of(c.raw_q, b, h, safe_rows, inside, D, BLOCK_D, ALIGNED)
                d_q = through_length(d_q, raw)
            store_rows(out.dq, b, h, safe_rows, inside, d_q, D, BLOCK_D, ALIGNED)

    if out.scale is not None:
        store_shared(out.scale, slot, G, g, N, safe_rows, inside, d_scale)
    if out.phi_q is not None:
        store_columns(out.phi_q, slot, G, g, N, safe_rows, inside, d_phi, COLUMNS, COLUMNS)
    if out.key_bias_rows is not None:
        store_shared(out.key_bias_rows, slot, G, g, N, safe_rows, inside, d_key)
    if out.alibi_rows is not None:
        store_shared(out.alibi_rows, slot, G, g, N, safe_rows, inside, d_alibi)
    if out.table_rows is not None:
        store_shared(out.table_rows, slot, G, g, N, safe_rows, inside, d_table)
    if out.region_rows is not None:
        store_shared(out.region_rows, slot, G, g, N, safe_rows, inside, d_region)
    if out.dense_rows is not None:
        store_shared(out.dense_rows, slot, G, g, N, safe_rows, inside, d_dense)
    if out.lookup_rows is not None:
        store_shared(out.lookup_rows, slot, G, g, N, safe_rows, inside, d_lookup)
    if out.diagonal is not None:
        store_shared(out.diagonal, slot, G, g, N, safe_rows, inside, d_diagonal)
    if out.rel_h is not None:
        store_columns(
            out.rel_h, slot, G, g, N, safe_rows, inside, d_high, KH, BLOCK_KH, first_column
        )
    if out.rel_w is not None:
        store_columns(
            out.rel_w, slot, G, g, N, safe_rows, inside, d_wide, KW, BLOCK_KW, first_column
        )

"""The Triton kernel for gradients of what belongs to keys, and the walk that it makes.

The kernel that adds gradients of queries with atomics makes the same one; see `triton_atomic`.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .triton_terms import add_terms, alibi_tile
from .triton_tiles import (
    add_rows,
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


class KeyGradients(NamedTuple):
    """Where `walk_keys` writes; None for what is not wanted.

    dk and dv have the heads of q. phi_k, key_bias, scale and slopes are (slots, G, M), and then
    columns: of each key, or sums for each key of what all keys share. `q_sums` and `phi_q_sums` are
    walks through fp32 zeros that are added to with atomics, by head of the group; batch entries and
    heads that share a place are summed.
    """

    dk: Any = None
    dv: Any = None
    phi_k: Any = None
    key_bias: Any = None
    scale: Any = None
    slopes: Any = None
    q_sums: Any = None
    phi_q_sums: Any = None


@triton.jit
def walk_keys(
    c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_SUMS: tl.constexpr,
    CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr, NATURAL: tl.constexpr,
    ADDED: tl.constexpr, WHOLE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program has one block of keys and walks over queries.

    Tiles are transposed, (BN, BM), so that weights enter the products as they are.
    """
    blocks = tl.cdiv(M, BN)
    pid = tl.program_id(0)
    first = pid % blocks * BN
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

    keys = first + tl.arange(0, BN)
    in_keys = keys < M
    safe_keys = tl.minimum(keys, M - 1).to(tl.int64)
    j = safe_keys[:, None]

    d_phi = tl.zeros([BN, COLUMNS if COLUMNS > 0 else 16], tl.float32)
    d_bias = tl.zeros([BN], tl.float32)
    d_scale = tl.zeros([BN], tl.float32)
    d_slope = tl.zeros([BN], tl.float32)

    lower = slot // entries.kept * entries.per_split
    for e in tl.range(lower, tl.minimum(lower + entries.per_split, entries.looped)):
        b = batch_entry(entries, kept, e)
        start = first_key(c, b, query_start)
        k = rows_of(c.k, b, h_kv, safe_keys, in_keys, D, BLOCK_D, ALIGNED)
        v = rows_of(c.v, b, h_kv, safe_keys, in_keys, DV, BLOCK_DV, ALIGNED)
        phi_k, met = 0.0, 0.0
        if COLUMNS > 0:
            phi_k = rows_of(t.phi_k, b, g, safe_keys, in_keys, COLUMNS, COLUMNS)
        if out.phi_q_sums is not None:  # what gradients of scores are multiplied with
            met = phi_k
            if t.phi_k_rounded is not None:
                met = rows_of(t.phi_k_rounded, b, g, safe_keys, in_keys, COLUMNS, COLUMNS)
        signed = with_sign(k, scale, size, SIGNED)
        d_k = tl.zeros([BN, BLOCK_D], tl.float32)
        d_v = tl.zeros([BN, BLOCK_DV], tl.float32)
        from_0 = tl.arange(0, BM).to(tl.int64)
        q_tile = cells(c.q, b, h, from_0, BLOCK_D, ALIGNED)
        do_tile = cells(c.do, b, h, from_0, BLOCK_DV, ALIGNED)
        phi_tile = 0.0
        rounded_tile = 0.0
        if COLUMNS > 0:
            phi_tile = cells(t.phi_q, b, g, from_0, COLUMNS, False)
            if t.phi_q_rounded is not None:
                rounded_tile = cells(t.phi_q_rounded, b, g, from_0, COLUMNS, False)
        # Queries that see all of these keys come first: of them nothing is hidden.
        begin, seen = 0, 0
        if CAUSAL:  # earlier queries see none
            begin = tl.maximum(first - start, 0) // BM * BM
            seen = tl.cdiv(tl.maximum(first + BN - 1 - start, 0), BM) * BM
        for PASS in tl.static_range(2 if CAUSAL else 1):
            for s in tl.range(
                begin if PASS == 1 else seen, tl.minimum(seen, N) if PASS == 1 else N, BM
            ):
                rows, inside, safe_rows = places(s, N, BM, WHOLE_ROWS)
                i = safe_rows[None, :]
                q = rows_from(q_tile, s, c.q, inside, D, BLOCK_D, ALIGNED)
                do = rows_from(do_tile, s, c.do, inside, DV, BLOCK_DV, ALIGNED)
                level, share, delta = row_sums(c, b, h, safe_rows, inside, NATURAL)
                qk = tl.dot(signed, tl.trans(q), input_precision="ieee")
                # asked for before weights are made, so that the tensor cores work meanwhile
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                phi_q = 0.0
                if COLUMNS > 0:
                    phi_q = rows_from(phi_tile, s, t.phi_q, inside, COLUMNS, COLUMNS)
                x = scores(qk, phi_k, phi_q, scale, size, COLUMNS, NATURAL, SIGNED)
                if ADDED:
                    x = add_terms(
                        x * unit, t, b, g, i, j, keys[:, None], start, region_value, M, SYMMETRIC
                    )
                p = weights(x, 1.0 if ADDED else unit, level[None, :], share[None, :], NATURAL)
                p = hide(p, c, b, rows[None, :], keys[:, None], j, start, M, WHOLE, PASS == 1)
                d_v = tl.dot(p.to(GRAD), do, d_v, input_precision="ieee")
                ds = p * (dp - delta[None, :])
                short = ds.to(GRAD)
                d_k = tl.dot(short, q.to(GRAD), d_k, input_precision="ieee")
                if out.phi_k is not None:
                    if t.phi_q_rounded is not None:
                        phi_q = rows_from(
                            rounded_tile, s, t.phi_q_rounded, inside, COLUMNS, COLUMNS
                        )
                    d_phi = tl.dot(short, phi_q.to(GRAD), d_phi, input_precision="ieee")
                upright = tl.trans(short)
                if out.q_sums is not None:
                    d_q = tl.dot(upright, k.to(GRAD), input_precision="ieee")
                    add_rows(out.q_sums, b, g, safe_rows, inside, d_q, D, BLOCK_D, ALIGNED_SUMS)
                if out.phi_q_sums is not None:
                    d_rows = tl.dot(upright, met.to(GRAD), input_precision="ieee")
                    add_rows(
                        out.phi_q_sums, b, g, safe_rows, inside, d_rows, COLUMNS, COLUMNS, True
                    )
                if out.scale is not None:
                    d_scale += tl.sum(ds * qk, 1)
                if out.slopes is not None:
                    d_slope += tl.sum(ds * alibi_tile(t, b, g, i, j, start, SYMMETRIC), 1)
                if out.key_bias is not None:
                    if t.key_bias_rows is not None:
                        where = i * t.key_bias_rows.strides[4]
                        ds = ds * tl.load(head(t.key_bias_rows, b, g) + where)
                    d_bias += tl.sum(ds, 1)

        if out.dk is not None:
            d_k = d_k * scale
            if COSINE:
                raw = rows_of(c.raw_k, b, h_kv, safe_keys, in_keys, D, BLOCK_D, ALIGNED)
                d_k = through_length(d_k, raw)
            store_rows(out.dk, b, h, safe_keys, in_keys, d_k, D, BLOCK_D, ALIGNED)
        if out.dv is not None:
            store_rows(out.dv, b, h, safe_keys, in_keys, d_v, DV, BLOCK_DV, ALIGNED)

    if out.phi_k is not None:
        # in half precision the factors of q are divided by the size of the scale
        d_phi = d_phi if NATURAL else d_phi * size
        store_columns(out.phi_k, slot, G, g, M, safe_keys, in_keys, d_phi, COLUMNS, COLUMNS)
    if out.key_bias is not None:
        store_shared(out.key_bias, slot, G, g, M, safe_keys, in_keys, d_bias)
    if out.scale is not None:
        store_shared(out.scale, slot, G, g, M, safe_keys, in_keys, d_scale)
    if out.slopes is not None:
        store_shared(out.slopes, slot, G, g, M, safe_keys, in_keys, d_slope)


@triton.jit(do_not_specialize=["query_start"])
def key_gradients_kernel(
    c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr, NATURAL: tl.constexpr,
    ADDED: tl.constexpr, WHOLE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv by query head, and the gradients of what belongs to keys."""
    walk_keys(
        c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M,
        D, DV, BLOCK_D, BLOCK_DV, COLUMNS, ALIGNED, False,
        CAUSAL, COSINE, SYMMETRIC, NATURAL, ADDED, WHOLE, WHOLE_ROWS, BM, BN,
    )  # fmt: skip

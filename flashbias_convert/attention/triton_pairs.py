"""The Triton kernels for gradients of what belongs to pairs of a query and a key.

`pair_gradients_kernel` writes the gradient of a score matrix, summed over the batch entries that
share it; for tables it does so for some rows at a time, and `sums_by_code_kernel` adds what has
the same code, in a fixed order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_terms import add_terms, gate
from .triton_tiles import (
    batch_entry,
    first_key,
    hide,
    parts_of_scale,
    row_sums,
    rows_of,
    scores,
    unit_of,
    weights,
    with_sign,
)


@triton.jit(do_not_specialize=["query_start", "first_row"])
def pair_gradients_kernel(
    c, t, out_ptr, gate_rows, entries, scale, query_start, region_value,
    G, kv_group, N, M, first_row, ROWS,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    CAUSAL: tl.constexpr, SYMMETRIC: tl.constexpr, NATURAL: tl.constexpr,
    ADDED: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of scores times `gate_rows`, fp32, (splits, kept entries, G, ROWS, M).

    Rows first_row ... first_row + ROWS - 1; a program has one tile.
    """
    row_blocks, key_blocks = tl.cdiv(ROWS, BM), tl.cdiv(M, BN)
    pid = tl.program_id(0)
    keys = pid % key_blocks * BN + tl.arange(0, BN)
    pid = pid // key_blocks
    own_rows = pid % row_blocks * BM + tl.arange(0, BM)
    g = (pid // row_blocks) % G
    slot = pid // row_blocks // G
    kept = slot % entries.kept
    h = g
    if t.heads is not None:
        h = tl.load(t.heads + g)
    h_kv = h // kv_group
    scale, size = parts_of_scale(c, scale, h)
    unit = unit_of(scale, size, COLUMNS, NATURAL)
    SIGNED: tl.constexpr = COLUMNS > 0 and not NATURAL

    rows = first_row + own_rows
    inside = (own_rows < ROWS) & (rows < N)
    in_keys = keys < M
    safe_rows = tl.minimum(rows, N - 1).to(tl.int64)
    safe_keys = tl.minimum(keys, M - 1).to(tl.int64)
    i, j = safe_rows[:, None], safe_keys[None, :]

    total = tl.zeros([BM, BN], tl.float32)
    lower = slot // entries.kept * entries.per_split
    for e in tl.range(lower, tl.minimum(lower + entries.per_split, entries.looped)):
        b = batch_entry(entries, kept, e)
        start = first_key(c, b, query_start)
        q = rows_of(c.q, b, h, safe_rows, inside, D, BLOCK_D, ALIGNED)
        k = rows_of(c.k, b, h_kv, safe_keys, in_keys, D, BLOCK_D, ALIGNED)
        q = with_sign(q, scale, size, SIGNED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        phi_q, phi_k = 0.0, 0.0
        if COLUMNS > 0:
            phi_q = rows_of(t.phi_q, b, g, safe_rows, inside, COLUMNS, COLUMNS)
            phi_k = rows_of(t.phi_k, b, g, safe_keys, in_keys, COLUMNS, COLUMNS)
        x = scores(x, phi_q, phi_k, scale, size, COLUMNS, NATURAL, SIGNED)
        if ADDED:
            x = add_terms(x * unit, t, b, g, i, j, keys[None, :], start, region_value, M, SYMMETRIC)
        level, share, delta = row_sums(c, b, h, safe_rows, inside, NATURAL)
        p = weights(x, 1.0 if ADDED else unit, level[:, None], share[:, None], NATURAL)
        p = hide(p, c, b, rows[:, None], keys[None, :], j, start, M, WHOLE, CAUSAL)
        do = rows_of(c.do, b, h, safe_rows, inside, DV, BLOCK_DV, ALIGNED)
        v = rows_of(c.v, b, h_kv, safe_keys, in_keys, DV, BLOCK_DV, ALIGNED)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        total += gate(p * (dp - delta[:, None]), gate_rows, b, g, i)

    out_ptr += (slot.to(tl.int64) * G + g) * ROWS * M
    where = own_rows.to(tl.int64)[:, None] * M + keys[None, :]
    tl.store(out_ptr + where, total, mask=inside[:, None] & in_keys[None, :])


@triton.jit
def sums_by_code_kernel(
    values_ptr, order_ptr, bounds_ptr, out_ptr, G, E, T, SPLITS, code_step,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Sums of values (K, G, E) by code, (splits, K, G, T).

    `order` lists the values by code, and `bounds` (T + 1) says where each code begins; both are
    the same for all K where `code_step` is 0, and have one row each where it is 1.
    """
    blocks = tl.cdiv(T, BT)
    pid = tl.program_id(0)
    codes = pid % blocks * BT + tl.arange(0, BT)
    pid = pid // blocks
    split = pid % SPLITS
    kg = (pid // SPLITS).to(tl.int64)
    own = kg // G * code_step
    values_ptr += kg * E
    order_ptr += own * E
    bounds_ptr += own * (T + 1)
    inside = codes < T
    begin = tl.load(bounds_ptr + codes, mask=inside, other=0)
    size = tl.load(bounds_ptr + codes + 1, mask=inside, other=0) - begin
    lower, upper = begin + size * split // SPLITS, begin + size * (split + 1) // SPLITS
    total = tl.zeros([BT, BE], tl.float32)
    for s in tl.range(0, tl.max(upper - lower, 0), BE):
        e = lower[:, None] + s + tl.arange(0, BE)[None, :]
        valid = e < upper[:, None]
        which = tl.load(order_ptr + e, mask=valid, other=0)
        total += tl.load(values_ptr + which, mask=valid, other=0.0)
    groups = tl.num_programs(0) // blocks // SPLITS
    tl.store(out_ptr + (split * groups + kg) * T + codes, tl.sum(total, 1), mask=inside)

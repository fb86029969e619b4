"""The Triton kernel: FlashAttention-2 with every term added to one tile of scores at a time.

Scores, softmax and accumulation are fp32; exponentials are in base 2. Positions stay integers.
Names: `*_ptr` pointers, `*_strides` tuples (batch 0, 1, 2, then the dimensions of the tensor),
`offs_*` index vectors, capitals for compile-time sizes. With `parts_ptr` several programs share the
keys of a row, and `triton_combine` adds up what they leave there.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from . import factors
from .triton_lookup import look_up, look_up_pairs, rows_of_pairs
from .triton_steps import (
    EDGES,
    INSIDE,
    LOG2E,
    at,
    follow,
    products,
    raise_level,
    start_quick,
    tile,
    usual_rows,
    visible_range,
    weights,
)

#: what fp32 cuts off of LOG2E
LOG2E_REST = tl.constexpr(1.92596298909109e-8)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_SCALE = tl.constexpr(factors.SMALLEST_SCALE)
#: of queries of cosine attention in fp16
LARGEST_LENGTH = tl.constexpr(32768.0)


@triton.jit
def _rows(ptr, strides, b0, b1, b2, g, offs_m):
    """One number per query row of a row scale, shape (BM,)."""
    return tl.load(at(ptr, strides, b0, b1, b2) + g * strides[3] + offs_m * strides[4])


@triton.jit
def _careful_exp(x):
    """exp in fp32, to little more than a rounding: what base 2 cuts off of `x` is put back."""
    y = x * LOG2E
    lost = tl.fma(x, LOG2E, -y) + x * LOG2E_REST
    lost = tl.where(tl.abs(y) < 256.0, lost, 0.0)  # infinities
    return tl.exp2(y) * (1.0 + lost * LN2)


@triton.jit(do_not_specialize=["query_start", "parts"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    q_strides, k_strides, v_strides, o_strides,
    scale, scale_ptr, heads_ptr,
    key_mask_ptr, key_mask_strides,
    query_start, starts_ptr, starts_strides,
    phi_q_ptr, phi_q_strides, phi_k_ptr, phi_k_strides,
    key_bias_ptr, key_bias_strides, key_bias_rows_ptr, key_bias_rows_strides,
    slopes_ptr, slopes_strides, alibi_rows_ptr, alibi_rows_strides,
    pos_q_ptr, pos_q_strides, pos_k_ptr, pos_k_strides,
    table_ptr, table_strides, table_rows_ptr, table_rows_strides,
    codes_q_ptr, codes_k_ptr,
    ids_ptr, ids_strides, key_ids_ptr, key_ids_strides, region_rows_ptr, region_rows_strides,
    dense_ptr, dense_strides, dense_desc, dense_rows_ptr, dense_rows_strides,
    diagonal_ptr, diagonal_strides, diagonal_rows_ptr, diagonal_rows_strides,
    lookup_ptr, lookup_strides, lookup_rows_ptr, lookup_rows_strides,
    lookup_code_ptr, lookup_code_strides,
    rel_h_ptr, rel_h_strides, rel_w_ptr, rel_w_strides, axial_rows_ptr, axial_rows_strides,
    axial_y_ptr, axial_x_ptr,
    lse_ptr, lse_strides, gate_ptr, gate_strides,
    parts_ptr, parts,
    region_value, batch_1, batch_2, G, kv_group, N, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr,
    PAIRS: tl.constexpr, DIVIDED: tl.constexpr, REGION_PAIRS: tl.constexpr,
    PLAIN_SCALE: tl.constexpr, NATURAL: tl.constexpr, ALIGNED_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr, BOUNDED: tl.constexpr,
    QUICK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    FP16: tl.constexpr = o_ptr.dtype.element_ty == tl.float16
    TRAINING: tl.constexpr = NATURAL and lse_ptr is not None
    # the backward pass rounds normalised queries without their scale
    IN_QUERIES: tl.constexpr = COSINE and not NATURAL and lse_ptr is None

    # which tile: query blocks fastest, so that programs side by side share k and v
    blocks = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    pid_m = pid % blocks
    g = (pid // blocks) % G
    b = pid // blocks // G
    if parts_ptr is not None:
        # heads before parts: those that share keys read the same ones at the same time
        part = b % parts
        b = b // parts
    b2 = b % batch_2
    b1 = (b // batch_2) % batch_1
    b0 = b // batch_2 // batch_1
    h = g
    if heads_ptr is not None:
        h = tl.load(heads_ptr + g)
    h_kv = h // kv_group

    first = pid_m * BM
    offs_m = first + tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # 64 bits where an offset within a tile may need them; so it is in a layout (M, B, H, D)
    near_n = offs_n.to(tl.int64) if WIDE else offs_n
    near_d = offs_d.to(tl.int64) if WIDE else offs_d
    near_dv = offs_dv.to(tl.int64) if WIDE else offs_dv
    in_rows = offs_m < N
    # vectors over rows are read at a valid row, so that they need no mask
    safe_m = tl.minimum(offs_m, N - 1).to(tl.int64)

    start = query_start
    if starts_ptr is not None:
        start = tl.load(at(starts_ptr, starts_strides, b0, b1, b2)).to(tl.int32)

    # scores are kept in units of the scale, x = (scale * q k + bias) / size: the size waits for the
    # exponential, where it is free, and the sign goes into q, where it is exact. A tiny scale goes
    # into q, too, lest what is divided by it overflows. For cosine attention see IN_QUERIES.
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + h)
    size = tl.where(tl.abs(scale) < SMALLEST_SCALE, 1.0, tl.abs(scale))
    sign = scale / size
    # in fp32 the units stay natural: dividing a large bias would round it
    per_size = 1.0 if NATURAL else 1.0 / size
    if IN_QUERIES:
        # rows that are made of length one may as well be made of that of the scale, with the one
        # rounding that they have: then x is what 2 is raised to, and terms are packed for that
        sign = scale * LOG2E
        if k_ptr.dtype.element_ty == tl.float16:  # as rows of length one are, beside bf16, too
            # a scale beyond is taken for this one, lest rows of a finite length overflow
            sign = tl.clamp(sign, -LARGEST_LENGTH, LARGEST_LENGTH)
        size = LN2
        per_size = LOG2E

    q_ptr = at(q_ptr, q_strides, b0, b1, b2) + h.to(tl.int64) * q_strides[3]
    q = tl.load(
        q_ptr + safe_m[:, None] * q_strides[4] + near_d[None, :] * q_strides[5],
        mask=in_rows[:, None] & (offs_d[None, :] < D),
        other=0.0,
    )  # (BM, BLOCK_D)
    if COSINE:
        wide = q.to(tl.float32)
        length = tl.sqrt(tl.sum(wide * wide, 1))
        wide = wide * (sign / tl.maximum(length, 1e-12))[:, None]
        q = wide.to(k_ptr.dtype.element_ty)
    elif not PLAIN_SCALE:
        q = (q * sign).to(q.dtype)

    phi_q = q
    if COLUMNS > 0:
        offs_c = tl.arange(0, COLUMNS)
        phi_q_ptr = at(phi_q_ptr, phi_q_strides, b0, b1, b2) + g.to(tl.int64) * phi_q_strides[3]
        phi_q = tl.load(
            phi_q_ptr + safe_m[:, None] * phi_q_strides[4] + offs_c[None, :],
            mask=in_rows[:, None],
            other=0.0,
        )  # (BM, COLUMNS)
        if not SCALED:
            wide_q = phi_q * per_size
            phi_q = wide_q.to(phi_k_ptr.dtype.element_ty)
            if SPLIT > 0:
                # every third of the leading columns carries what rounding has cut off
                is_low = (offs_c < 3 * SPLIT) & (offs_c % 3 == 2)
                low = (wide_q - phi_q.to(tl.float32)).to(phi_q.dtype)
                phi_q = tl.where(is_low[None, :], low, phi_q)

    # what the elementwise terms need of the rows
    if key_bias_ptr is not None:
        key_bias_ptr = at(key_bias_ptr, key_bias_strides, b0, b1, b2) + g * key_bias_strides[3]
        if key_bias_rows_ptr is not None:
            key_bias_row = _rows(key_bias_rows_ptr, key_bias_rows_strides, b0, b1, b2, g, safe_m)
            key_bias_row *= per_size
    if slopes_ptr is not None:
        slope = tl.load(at(slopes_ptr, slopes_strides, b0, b1, b2) + g * slopes_strides[3])
        origin = start + first
        position = start + offs_m
        if pos_q_ptr is not None:
            pos_q_ptr = at(pos_q_ptr, pos_q_strides, b0, b1, b2)
            origin = tl.load(pos_q_ptr + tl.cast(first, tl.int64) * pos_q_strides[3])
            position = tl.load(pos_q_ptr + safe_m * pos_q_strides[3])
        position = (position - origin).to(tl.float32)
        row_slope = tl.zeros([BM], tl.float32) + slope * per_size
        if alibi_rows_ptr is not None:
            row_slope *= _rows(alibi_rows_ptr, alibi_rows_strides, b0, b1, b2, g, safe_m)
        if pos_k_ptr is not None:
            pos_k_ptr = at(pos_k_ptr, pos_k_strides, b0, b1, b2)
    if table_ptr is not None:
        table_ptr = at(table_ptr, table_strides, b0, b1, b2) + g.to(tl.int64) * table_strides[3]
        code = tl.load(codes_q_ptr + safe_m)
        if PAIRS:
            code = rows_of_pairs(table_ptr, code)
        per_entry = 1.0 if DIVIDED else per_size
        if table_rows_ptr is not None:
            table_row = _rows(table_rows_ptr, table_rows_strides, b0, b1, b2, g, safe_m)
            table_row *= per_entry
    if ids_ptr is not None:
        region = tl.load(at(ids_ptr, ids_strides, b0, b1, b2) + safe_m * ids_strides[3])
        key_ids_ptr = at(key_ids_ptr, key_ids_strides, b0, b1, b2)
        region_row = tl.zeros([BM], tl.float32) + region_value * per_size
        if region_rows_ptr is not None:
            region_row *= _rows(region_rows_ptr, region_rows_strides, b0, b1, b2, g, safe_m)
    if dense_ptr is not None:
        if dense_desc is not None:
            # one matrix of the rows of all heads and batch entries
            before = at(g.to(tl.int64) * dense_strides[3], dense_strides, b0, b1, b2)
            dense_first = (before // dense_strides[4]).to(tl.int32) + first
        dense_ptr = at(dense_ptr, dense_strides, b0, b1, b2) + g.to(tl.int64) * dense_strides[3]
        dense_ptr = dense_ptr + safe_m * dense_strides[4]
        if dense_rows_ptr is not None:
            dense_row = _rows(dense_rows_ptr, dense_rows_strides, b0, b1, b2, g, safe_m)
    if diagonal_ptr is not None:
        own_key = start + offs_m
        diagonal_row = _rows(diagonal_ptr, diagonal_strides, b0, b1, b2, g, safe_m) * per_size
        if diagonal_rows_ptr is not None:
            diagonal_row *= _rows(diagonal_rows_ptr, diagonal_rows_strides, b0, b1, b2, g, safe_m)
    if lookup_ptr is not None:
        lookup_ptr = at(lookup_ptr, lookup_strides, b0, b1, b2)
        lookup_ptr += g.to(tl.int64) * lookup_strides[3]
        lookup_code_ptr = at(lookup_code_ptr, lookup_code_strides, b0, b1, b2)
        lookup_code_ptr = lookup_code_ptr + safe_m * lookup_code_strides[3]
        lookup_row = tl.zeros([BM], tl.float32) + per_size
        if lookup_rows_ptr is not None:
            lookup_row *= _rows(lookup_rows_ptr, lookup_rows_strides, b0, b1, b2, g, safe_m)
    if rel_h_ptr is not None:
        rel_h_ptr = at(rel_h_ptr, rel_h_strides, b0, b1, b2) + g.to(tl.int64) * rel_h_strides[3]
        rel_h_ptr = rel_h_ptr + safe_m * rel_h_strides[4]
        rel_w_ptr = at(rel_w_ptr, rel_w_strides, b0, b1, b2) + g.to(tl.int64) * rel_w_strides[3]
        rel_w_ptr = rel_w_ptr + safe_m * rel_w_strides[4]
        axial_row = tl.zeros([BM], tl.float32) + per_size
        if axial_rows_ptr is not None:
            axial_row *= _rows(axial_rows_ptr, axial_rows_strides, b0, b1, b2, g, safe_m)
    if key_mask_ptr is not None:
        key_mask_ptr = at(key_mask_ptr, key_mask_strides, b0, b1, b2)

    # keys below `full` are visible to every row of this block, keys from `end` on to none
    end = M
    full = M // BN * BN
    if CAUSAL:
        end = tl.maximum(tl.minimum(M, start + first + BM), 0)
        full = tl.minimum(full, tl.maximum(start + first + 1, 0) // BN * BN)
    begin, left, seen = 0, 0, M
    SCANNED: tl.constexpr = key_mask_ptr is not None and parts_ptr is None
    if SCANNED:
        # of padding it is enough to know where it is: hidden keys at both ends are not read, and
        # tiles between them need no mask. One at the left that is hidden in part comes first.
        first_seen, end, is_range = visible_range(key_mask_ptr, key_mask_strides[3], end)
        padded_tile = first_seen // BN * BN
        left = tl.where(first_seen > padded_tile, BN, 0)
        begin = padded_tile + left
        full = tl.maximum(tl.minimum(full, end // BN * BN), begin)
        end, seen = tl.maximum(end, begin), end - padded_tile
    if parts_ptr is not None:
        # whole blocks of the keys that are visible at all, shared out evenly; none, where blocks
        # are fewer than parts
        steps = tl.cdiv(end, BN)
        each, more = steps // parts, steps % parts
        begin = (part * each + tl.minimum(part, more)) * BN
        stop = begin + (each + tl.where(part < more, 1, 0)) * BN
        end = tl.maximum(tl.minimum(end, stop), begin)
        full = tl.maximum(tl.minimum(full, end), begin)
        seen = end - begin

    k_ptr = at(k_ptr, k_strides, b0, b1, b2) + h_kv.to(tl.int64) * k_strides[3]
    v_ptr = at(v_ptr, v_strides, b0, b1, b2) + h_kv.to(tl.int64) * v_strides[3]
    if ALIGNED_ROWS:
        k_ptr, v_ptr = tl.multiple_of(k_ptr, 16), tl.multiple_of(v_ptr, 16)
    k_ptrs = k_ptr + near_n[None, :] * k_strides[4] + near_d[:, None] * k_strides[5]
    v_ptrs = v_ptr + near_n[:, None] * v_strides[4] + near_dv[None, :] * v_strides[5]
    phi_k_ptrs = k_ptrs
    if COLUMNS > 0:
        phi_k_ptr = at(phi_k_ptr, phi_k_strides, b0, b1, b2)
        phi_k_ptr += g.to(tl.int64) * phi_k_strides[3]
        phi_k_ptrs = phi_k_ptr + near_n[None, :] * phi_k_strides[4] + offs_c[:, None]
    if lookup_ptr is not None:
        lookup_code_ptrs = lookup_code_ptr[:, None] + near_n[None, :] * lookup_code_strides[4]
    if dense_ptr is not None:
        dense_ptrs = dense_ptr[:, None] + near_n[None, :] * dense_strides[5]

    to_exp2 = LOG2E if NATURAL else 1.0 if IN_QUERIES else size * LOG2E
    if ids_ptr is not None:
        apart = region_row * to_exp2
    # Tiles that need a mask come first: with causal attention a query's own key is among them. The
    # largest scores seen there are the level of quick steps, which look for no larger ones; whether
    # that was right shows in the sums, and a block where it was not is computed once more.
    first_key = full
    if QUICK:
        first_key = tl.where((full == end) & (left == 0), tl.maximum(end - BN, begin), full)
    quick_end = first_key
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    again = True
    while again:
        for PASS in tl.static_range(3 if SCANNED else 2):
            lower = first_key - left if PASS == EDGES else begin
            upper = end if PASS == EDGES else quick_end
            if SCANNED and PASS != EDGES:
                upper = tl.where(is_range == (PASS == INSIDE), quick_end, begin)
            if QUICK and PASS == INSIDE:
                raised = raise_level(top, quick_end > begin, to_exp2, FP16)
                if parts_ptr is not None:
                    # with ALiBi far keys are all low; a whole block of them is as good a level as
                    # any, and no reason to compute a part twice
                    raised = tl.where((full == end) & (top > float("-inf")), top, raised)
                total, acc, least = start_quick(top, raised, total, acc, to_exp2, seen, FP16)
                top = raised
            for s in tl.range(lower, upper, BN):
                if SCANNED and PASS == EDGES:
                    s = tl.multiple_of(tl.where(s < first_key, padded_tile, s), BN)
                x = products(
                    q, phi_q, k_ptrs, phi_k_ptrs, k_strides, phi_k_strides,
                    s, offs_n, M, offs_d, size,
                    D, BLOCK_D, COLUMNS, NATURAL, WIDE, PASS == EDGES,
                )  # fmt: skip
                far = tl.cast(s, tl.int64) if WIDE else s
                offs_k = s + offs_n
                in_keys = offs_k < M
                # vectors over keys are read at a valid key; scores of others are masked below
                safe_k = tl.minimum(offs_k, M - 1) if PASS == EDGES else offs_k
                safe_k = safe_k.to(tl.int64)

                if key_bias_ptr is not None:
                    key = tl.load(key_bias_ptr + safe_k * key_bias_strides[4])
                    if key_bias_rows_ptr is not None:
                        x = tl.fma(key_bias_row[:, None], key[None, :], x)
                    else:
                        x = tl.fma(key[None, :], per_size, x)
                if slopes_ptr is not None:
                    where = offs_k
                    if pos_k_ptr is not None:
                        where = tl.load(pos_k_ptr + safe_k * pos_k_strides[3])
                    # integers up to here; their differences are exact in fp32 up to 2**24
                    distance = (where - origin).to(tl.float32)
                    if SYMMETRIC:
                        x -= row_slope[:, None] * tl.abs(distance[None, :] - position[:, None])
                    elif alibi_rows_ptr is not None:
                        x += row_slope[:, None] * (distance[None, :] - position[:, None])
                    else:
                        # softmax ignores what is constant along a row, so only keys are
                        # counted, from the first query of the block on: near it they are few,
                        # and exact
                        x = tl.fma(distance[None, :], slope * per_size, x)
                if table_ptr is not None:
                    if PAIRS:
                        even = s + 2 * tl.arange(0, BN // 2)
                        even = tl.minimum(even, M - 2) if PASS == EDGES else even
                        entry = look_up_pairs(code, tl.load(codes_k_ptr + even), BM, BN)
                    else:
                        key_code = tl.load(codes_k_ptr + safe_k)
                        entry = look_up(table_ptr, code[:, None] + key_code[None, :])
                    if table_rows_ptr is not None:
                        x += entry * table_row[:, None]
                    else:
                        x += entry * per_entry
                if ids_ptr is not None:
                    if REGION_PAIRS:
                        even = s + 2 * tl.arange(0, BN // 2)
                        even = tl.minimum(even, M - 2) if PASS == EDGES else even
                        key_region = tl.load(key_ids_ptr + even.to(tl.int64) * key_ids_strides[3])
                        same = region[:, None] == key_region[None, :]
                        same = tl.reshape(tl.join(same, same), [BM, BN])
                    else:
                        key_region = tl.load(key_ids_ptr + safe_k * key_ids_strides[3])
                        same = region[:, None] == key_region[None, :]
                    # elsewhere it is chosen with what is subtracted: an addition less
                    if not (BOUNDED or (QUICK and PASS != EDGES)):
                        x = tl.where(same, x, x + region_row[:, None])
                if dense_ptr is not None:
                    row = per_size
                    if dense_rows_ptr is not None:
                        row = (dense_row * per_size)[:, None]
                    if dense_desc is not None:
                        # with an addition, which the compiler moves before the product, the
                        # tile would not be read ahead
                        cell = dense_desc.load([dense_first, s])  # (BM, BN)
                        x = tl.fma(cell.to(tl.float32), row, x)
                    else:
                        cell = tile(
                            dense_ptrs + far * dense_strides[5],
                            in_keys[None, :],
                            None,
                            PASS == EDGES,
                            False,
                        )  # (BM, BN)
                        x += cell.to(tl.float32) * row

                if diagonal_ptr is not None:
                    meets = offs_k[None, :] == own_key[:, None]
                    x += tl.where(meets, diagonal_row[:, None], 0.0)
                if lookup_ptr is not None:
                    code_tile = tile(
                        lookup_code_ptrs + far * lookup_code_strides[4],
                        in_keys[None, :],
                        None,
                        PASS == EDGES,
                        False,
                    )  # (BM, BN)
                    x += look_up(lookup_ptr, code_tile) * lookup_row[:, None]
                if rel_h_ptr is not None:
                    key_y = tl.load(axial_y_ptr + safe_k)
                    key_x = tl.load(axial_x_ptr + safe_k)
                    both = tl.load(rel_h_ptr[:, None] + key_y[None, :]).to(tl.float32)
                    both += tl.load(rel_w_ptr[:, None] + key_x[None, :]).to(tl.float32)
                    x += both * axial_row[:, None]

                if PASS == EDGES:
                    x = tl.where(in_keys[None, :], x, float("-inf"))
                    if CAUSAL:
                        x = tl.where(offs_k[None, :] <= start + offs_m[:, None], x, float("-inf"))
                if key_mask_ptr is not None and (PASS != INSIDE or not SCANNED):
                    visible = tl.load(key_mask_ptr + safe_k * key_mask_strides[3])
                    x = tl.where(visible[None, :] != 0, x, float("-inf"))

                if BOUNDED:
                    # no exponential can overflow: no need to follow the largest score
                    if ids_ptr is not None:
                        x = tl.fma(x, to_exp2, tl.where(same, 0.0, apart[:, None]))
                        p = tl.exp2(x)
                    else:
                        p = tl.exp2(x * to_exp2)
                    total += tl.sum(p, 1)
                elif PASS == EDGES or not QUICK:
                    top, total, acc, p = follow(x, top, total, acc, to_exp2, TRAINING)
                else:
                    if ids_ptr is not None:
                        level = top * to_exp2
                        level = tl.where(same, -level[:, None], (apart - level)[:, None])
                        p = tl.exp2(tl.fma(x, to_exp2, level))
                    else:
                        p = weights(x, top, to_exp2, TRAINING)
                    total += tl.sum(p, 1)
                v = tile(
                    v_ptrs + far * v_strides[4],
                    in_keys[:, None],
                    offs_dv[None, :] < DV,
                    PASS == EDGES,
                    DV < BLOCK_DV,
                )  # (BN, BLOCK_DV)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        again = False
        if QUICK:
            unusual = in_rows & (usual_rows(total, acc, least, FP16) == 0)
            again = (tl.max(unusual.to(tl.int32), 0) > 0) & (quick_end > begin)
            if again:
                first_key, quick_end = begin, begin
                top = tl.full([BM], float("-inf"), tl.float32)
                total = tl.zeros([BM], tl.float32)
                acc = tl.zeros([BM, BLOCK_DV], tl.float32)

    if parts_ptr is not None:
        # sums (rows, DV), then levels and totals (rows,); a row is one of a part. Levels are in
        # base 2, and -inf where nothing is visible.
        level = tl.where(total == 0.0, float("-inf"), 0.0 if BOUNDED else top * to_exp2)
        rows = tl.num_programs(0).to(tl.int64) // blocks * N
        row = (pid // blocks).to(tl.int64) * N + safe_m
        tl.store(
            parts_ptr + row[:, None] * DV + offs_dv[None, :],
            acc,
            mask=in_rows[:, None] & (offs_dv[None, :] < DV),
        )
        tl.store(parts_ptr + rows * DV + row, level, mask=in_rows)
        tl.store(parts_ptr + rows * (DV + 1) + row, total, mask=in_rows)
    else:
        # a row without any visible key gives zeros
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if gate_ptr is not None:
            gate_ptr = at(gate_ptr, gate_strides, b0, b1, b2) + h.to(tl.int64) * gate_strides[3]
            gate = tl.load(
                gate_ptr + safe_m[:, None] * gate_strides[4] + offs_dv[None, :] * gate_strides[5],
                mask=in_rows[:, None] & (offs_dv[None, :] < DV),
                other=0.0,
            )  # (BM, BLOCK_DV)
            if NATURAL:
                acc = tl.div_rn(acc, 1.0 + _careful_exp(-gate.to(tl.float32)))
            else:
                acc = acc / (1.0 + tl.exp(-gate.to(tl.float32)))
        o_ptr = at(o_ptr, o_strides, b0, b1, b2) + h.to(tl.int64) * o_strides[3]
        tl.store(
            o_ptr + safe_m[:, None] * o_strides[4] + offs_dv[None, :] * o_strides[5],
            acc.to(o_ptr.dtype.element_ty),
            mask=in_rows[:, None] & (offs_dv[None, :] < DV),
        )
    if lse_ptr is not None:
        # For the backward pass. In fp32 two numbers of each row, in natural units: what was
        # subtracted before exponentials were taken, and one by their sum; in half precision the
        # logarithm of that sum to base 2, with what was subtracted. Scores are those of the
        # formula, what is constant along a row included. Weights computed from what is written for
        # a row that sees nothing are zero.
        level = tl.zeros([BM], tl.float32)
        if not BOUNDED:
            level = tl.where(total == 0.0, 0.0, top) * (1.0 if NATURAL else size)
        if slopes_ptr is not None and not SYMMETRIC and alibi_rows_ptr is None:
            level -= slope * position
        lse_ptr = at(lse_ptr, lse_strides, b0, b1, b2) + h.to(tl.int64) * lse_strides[3]
        lse_ptr = lse_ptr + safe_m * lse_strides[4]
        some = tl.where(total == 0.0, 1.0, total)
        if NATURAL:
            tl.store(lse_ptr, level, mask=in_rows)
            share = tl.where(total == 0.0, 0.0, 1.0 / some)
            tl.store(lse_ptr + lse_strides[5], share, mask=in_rows)
        else:
            level = tl.where(total == 0.0, float("inf"), level * LOG2E + tl.log2(some))
            tl.store(lse_ptr, level, mask=in_rows)

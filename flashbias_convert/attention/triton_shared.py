"""The Triton kernel of two batch entries whose queries share each tile of a dense bias.

The rows of a triangle have one bias, and most of what a card reads for them is that bias: a program
has the same block of queries of two entries, and adds each tile to the scores of both. Everything
else is as in `triton_forward`, whose names and passes these are. Inference in half precision, of a
dense bias alone: with a mask of keys and a gate, whose reads the few programs of this kind cannot
hide, two entries took longer than apart on an H200.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

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
    weights,
)


@triton.jit
def _queries(ptr, strides, b0, b1, b2, h, rows, offs, in_rows, SIZE: tl.constexpr):
    """A block of rows of one entry, (len(rows), len(offs)); zeros outside."""
    ptr = at(ptr, strides, b0, b1, b2) + h.to(tl.int64) * strides[3]
    where = ptr + rows[:, None] * strides[4] + offs[None, :] * strides[5]
    return tl.load(where, mask=in_rows[:, None] & (offs[None, :] < SIZE), other=0.0)


@triton.jit
def _attend(x, v, top, total, acc, to_exp2, EDGE: tl.constexpr):
    """Take a tile of scores in: weights, their sums, and the values that they weigh."""
    if EDGE:
        top, total, acc, p = follow(x, top, total, acc, to_exp2, False)
    else:
        p = weights(x, top, to_exp2, False)
        total += tl.sum(p, 1)
    return top, total, tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _write(
    o_ptr, o_strides, b0, b1, b2, h, rows, offs, in_rows, acc, total, DV: tl.constexpr,
):  # fmt: skip
    """The output of one entry; a row without any visible key gives zeros."""
    nothing = total == 0.0
    acc = tl.where(nothing[:, None], 0.0, acc / tl.where(nothing, 1.0, total)[:, None])
    o_ptr = at(o_ptr, o_strides, b0, b1, b2) + h.to(tl.int64) * o_strides[3]
    where = o_ptr + rows[:, None] * o_strides[4] + offs[None, :] * o_strides[5]
    tl.store(where, acc.to(o_ptr.dtype.element_ty), mask=in_rows[:, None] & (offs[None, :] < DV))


@triton.jit
def shared_dense_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, dense_ptr,
    q_strides, k_strides, v_strides, o_strides, dense_strides,
    dense_desc, scale, query_start, batch_1, batch_2, G, kv_group, N, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGNED_ROWS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    FP16: tl.constexpr = o_ptr.dtype.element_ty == tl.float16

    # two entries along the last batch dimension; of an odd number the last one comes twice
    blocks = tl.cdiv(N, BM)
    pairs = tl.cdiv(batch_2, 2)
    pid = tl.program_id(0)
    g = (pid // blocks) % G
    b = pid // blocks // G
    c_0 = b % pairs * 2
    c_1 = tl.minimum(c_0 + 1, batch_2 - 1)
    b1 = (b // pairs) % batch_1
    b0 = b // pairs // batch_1
    h_kv = g // kv_group

    first = pid % blocks * BM
    offs_m = first + tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    near_n = offs_n.to(tl.int64) if WIDE else offs_n
    near_d = offs_d.to(tl.int64) if WIDE else offs_d
    near_dv = offs_dv.to(tl.int64) if WIDE else offs_dv
    in_rows = offs_m < N
    safe_m = tl.minimum(offs_m, N - 1).to(tl.int64)

    q_0 = _queries(q_ptr, q_strides, b0, b1, c_0, g, safe_m, near_d, in_rows, D)
    q_1 = _queries(q_ptr, q_strides, b0, b1, c_1, g, safe_m, near_d, in_rows, D)
    per_size = 1.0 / scale
    to_exp2 = scale * LOG2E

    k_0 = at(k_ptr, k_strides, b0, b1, c_0) + h_kv.to(tl.int64) * k_strides[3]
    k_1 = at(k_ptr, k_strides, b0, b1, c_1) + h_kv.to(tl.int64) * k_strides[3]
    v_0 = at(v_ptr, v_strides, b0, b1, c_0) + h_kv.to(tl.int64) * v_strides[3]
    v_1 = at(v_ptr, v_strides, b0, b1, c_1) + h_kv.to(tl.int64) * v_strides[3]
    if ALIGNED_ROWS:
        k_0, k_1 = tl.multiple_of(k_0, 16), tl.multiple_of(k_1, 16)
        v_0, v_1 = tl.multiple_of(v_0, 16), tl.multiple_of(v_1, 16)
    of_k = near_n[None, :] * k_strides[4] + near_d[:, None] * k_strides[5]
    of_v = near_n[:, None] * v_strides[4] + near_dv[None, :] * v_strides[5]
    k_0, k_1, v_0, v_1 = k_0 + of_k, k_1 + of_k, v_0 + of_v, v_1 + of_v
    if dense_desc is not None:
        before = at(g.to(tl.int64) * dense_strides[3], dense_strides, b0, b1, c_0)
        dense_first = (before // dense_strides[4]).to(tl.int32) + first
    else:
        dense_ptr = at(dense_ptr, dense_strides, b0, b1, c_0) + g.to(tl.int64) * dense_strides[3]
        dense_ptrs = dense_ptr + safe_m[:, None] * dense_strides[4]
        dense_ptrs += near_n[None, :] * dense_strides[5]

    full = M // BN * BN
    first_key = tl.where(full == M, tl.maximum(M - BN, 0), full)
    quick_end = first_key
    top_0 = tl.full([BM], float("-inf"), tl.float32)
    top_1 = tl.full([BM], float("-inf"), tl.float32)
    total_0, total_1 = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    acc_0 = tl.zeros([BM, BLOCK_DV], tl.float32)
    acc_1 = tl.zeros([BM, BLOCK_DV], tl.float32)
    again = True
    while again:
        for PASS in tl.static_range(2):
            lower, upper = first_key if PASS == EDGES else 0, M if PASS == EDGES else quick_end
            if PASS == INSIDE:
                raised = raise_level(top_0, quick_end > 0, to_exp2, FP16)
                total_0, acc_0, least_0 = start_quick(
                    top_0, raised, total_0, acc_0, to_exp2, M, FP16
                )
                top_0 = raised
                raised = raise_level(top_1, quick_end > 0, to_exp2, FP16)
                total_1, acc_1, least_1 = start_quick(
                    top_1, raised, total_1, acc_1, to_exp2, M, FP16
                )
                top_1 = raised
            for s in tl.range(lower, upper, BN):
                # the product of the second entry is under way while weights of the first are made
                x_0 = products(
                    q_0, q_0, k_0, k_0, k_strides, k_strides, s, offs_n, M, offs_d, 1.0,
                    D, BLOCK_D, 0, False, WIDE, PASS == EDGES,
                )  # fmt: skip
                x_1 = products(
                    q_1, q_1, k_1, k_1, k_strides, k_strides, s, offs_n, M, offs_d, 1.0,
                    D, BLOCK_D, 0, False, WIDE, PASS == EDGES,
                )  # fmt: skip
                far = tl.cast(s, tl.int64) if WIDE else s
                offs_k = s + offs_n
                in_keys = offs_k < M
                if dense_desc is not None:
                    cell = dense_desc.load([dense_first, s])  # (BM, BN)
                else:
                    cell = tile(
                        dense_ptrs + far * dense_strides[5], in_keys[None, :], None,
                        PASS == EDGES, False,
                    )  # fmt: skip
                # an addition would be moved before the product, see `triton_forward`
                x_0 = tl.fma(cell.to(tl.float32), per_size, x_0)
                x_1 = tl.fma(cell.to(tl.float32), per_size, x_1)
                if PASS == EDGES:
                    x_0 = tl.where(in_keys[None, :], x_0, float("-inf"))
                    x_1 = tl.where(in_keys[None, :], x_1, float("-inf"))
                in_columns = offs_dv[None, :] < DV
                step = far * v_strides[4]
                v = tile(v_0 + step, in_keys[:, None], in_columns, PASS == EDGES, DV < BLOCK_DV)
                top_0, total_0, acc_0 = _attend(
                    x_0, v, top_0, total_0, acc_0, to_exp2, PASS == EDGES
                )
                v = tile(v_1 + step, in_keys[:, None], in_columns, PASS == EDGES, DV < BLOCK_DV)
                top_1, total_1, acc_1 = _attend(
                    x_1, v, top_1, total_1, acc_1, to_exp2, PASS == EDGES
                )
        usual = usual_rows(total_0, acc_0, least_0, FP16) & usual_rows(
            total_1, acc_1, least_1, FP16
        )
        unusual = in_rows & (usual == 0)
        again = (tl.max(unusual.to(tl.int32), 0) > 0) & (quick_end > 0)
        if again:
            first_key, quick_end = 0, 0
            top_0 = tl.full([BM], float("-inf"), tl.float32)
            top_1 = tl.full([BM], float("-inf"), tl.float32)
            total_0, total_1 = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
            acc_0 = tl.zeros([BM, BLOCK_DV], tl.float32)
            acc_1 = tl.zeros([BM, BLOCK_DV], tl.float32)

    _write(o_ptr, o_strides, b0, b1, c_0, g, safe_m, offs_dv, in_rows, acc_0, total_0, DV)
    _write(o_ptr, o_strides, b0, b1, c_1, g, safe_m, offs_dv, in_rows, acc_1, total_1, DV)

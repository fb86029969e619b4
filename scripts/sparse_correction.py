"""A few cells added to the bias of an attention that has run: its output changes in closed form.

With a low-rank bias in the main pass, and sparse values b on a few keys of each row,

    out' = (out + sum_j w_j v_j) / (1 + sum_j w_j),
    w_j = exp(s_ij + low_ij - lse_i) (exp(b_ij) - 1),

so that a second kernel needs q, k and v of those cells alone, and the log-sum-exp of the rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: queries of a program
BLOCK = 32
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Cells:
    """Cells of a bias that keep their values.

    Attributes:
        index: int32 (N, K), the keys of each row, without repeats; shared by the heads.
        low: fp32 (H, N, K), the low-rank part there.
        sparse: fp32 (H, N, K), what is added to it.
    """

    index: Tensor
    low: Tensor
    sparse: Tensor


def corrected(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cells: Cells, scale: float
) -> Tensor:
    """In torch; q, k, v, out (1, H, N, D), lse as `attention_training` gives it.

    That is (1, H, N, 2) in fp32, what was subtracted and the inverse of the sum, and (1, H, N, 1)
    in half precision, both in one logarithm to base 2.
    """
    at = cells.index.long()
    near = k[0][:, at].float()  # (H, N, K, D)
    scores = torch.einsum("hnd,hnkd->hnk", q[0].float(), near) * scale + cells.low
    if lse.shape[-1] == 1:
        weights = (scores * LOG2E - lse[0]).exp2() * cells.sparse.expm1()
    else:
        weights = (scores - lse[0, ..., :1]).exp() * lse[0, ..., 1:] * cells.sparse.expm1()
    added = torch.einsum("hnk,hnkd->hnd", weights, v[0][:, at].float())
    total = 1 + weights.sum(-1, keepdim=True)
    return ((out[0].float() + added) / total).to(out.dtype)[None]


def corrected_by_kernel(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cells: Cells, scale: float
) -> Tensor:
    """The same in one kernel; D is a power of two, and tensors but `out` are contiguous."""
    _, heads, n, d = q.shape
    made = torch.empty_like(q)
    grid = (triton.cdiv(n, BLOCK), heads)
    _correct[grid](
        q, k, v, out, lse, cells.index, cells.low, cells.sparse, made, scale, n, k.shape[-2],
        out.stride(1), out.stride(2),
        D=d, K=cells.index.shape[-1], BLOCK_N=BLOCK, NUMBERS=lse.shape[-1], TO_BASE_2=LOG2E,
    )  # fmt: skip
    return made


@triton.jit
def _correct(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, index_ptr, low_ptr, sparse_ptr, made_ptr,
    scale, n, m, out_head, out_row, D: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    NUMBERS: tl.constexpr, TO_BASE_2: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < n
    column = tl.arange(0, D)
    flat = (head * n + rows)[:, None] * D + column[None, :]
    q = tl.load(q_ptr + flat, inside[:, None], 0.0).to(tl.float32) * scale
    own = (head * out_head + rows.to(tl.int64) * out_row)[:, None] + column[None, :]
    acc = tl.load(out_ptr + own, inside[:, None], 0.0).to(tl.float32)
    lse_ptr += (head * n + rows) * NUMBERS
    shift = tl.load(lse_ptr, inside, 0.0)
    if NUMBERS == 2:
        share = tl.load(lse_ptr + 1, inside, 0.0)
    total = tl.full([BLOCK_N], 1.0, tl.float32)
    for j in range(K):
        key = tl.load(index_ptr + rows * K + j, inside, 0).to(tl.int64)
        cell = (head * n + rows) * K + j
        low = tl.load(low_ptr + cell, inside, 0.0)
        sparse = tl.load(sparse_ptr + cell, inside, 0.0)
        near = (head * m + key)[:, None] * D + column[None, :]
        k = tl.load(k_ptr + near, inside[:, None], 0.0).to(tl.float32)
        v = tl.load(v_ptr + near, inside[:, None], 0.0).to(tl.float32)
        score = tl.sum(q * k, 1) + low
        if NUMBERS == 2:
            weight = tl.exp(score - shift) * share
        else:
            weight = tl.exp2(score * TO_BASE_2 - shift)
        weight *= tl.exp(sparse) - 1.0
        acc += weight[:, None] * v
        total += weight
    acc = acc / total[:, None]
    tl.store(made_ptr + flat, acc.to(made_ptr.dtype.element_ty), inside[:, None])

"""The Triton kernel that adds up what programs with a part of the keys each have left.

A row's softmax over all keys is a sum of those over parts, each weighed by its total relative to
the largest level. One program adds up one row, always in the same order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_steps import at


@triton.jit(do_not_specialize=["parts"])
def combine_parts_kernel(
    parts_ptr, o_ptr, o_strides, heads_ptr, parts, batch_1, batch_2, G, N,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write rows of o (*batch, H, N, DV); `parts_ptr` as `attention_kernel` has written it.

    PARTS is a power of two, and at least `parts`.
    """
    pid = tl.program_id(0)
    n = pid % N
    g = (pid // N) % G
    b = pid // N // G
    h = g
    if heads_ptr is not None:
        h = tl.load(heads_ptr + g)
    rows = tl.num_programs(0).to(tl.int64) * parts
    offs_p = tl.arange(0, PARTS)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_parts = offs_p < parts
    row = ((b.to(tl.int64) * parts + offs_p) * G + g) * N + n
    level = tl.load(parts_ptr + rows * DV + row, mask=in_parts, other=float("-inf"))
    total = tl.load(parts_ptr + rows * (DV + 1) + row, mask=in_parts, other=0.0)
    acc = tl.load(
        parts_ptr + row[:, None] * DV + offs_dv[None, :],
        mask=in_parts[:, None] & (offs_dv[None, :] < DV),
        other=0.0,
    )  # (PARTS, BLOCK_DV)
    top = tl.max(level, 0)
    # where no part sees anything, -inf - -inf would be NaN
    weight = tl.exp2(level - tl.where(top == float("-inf"), 0.0, top))
    whole = tl.sum(weight * total, 0)
    out = tl.sum(weight[:, None] * acc, 0) / tl.where(whole == 0.0, 1.0, whole)
    o_ptr = at(o_ptr, o_strides, b // batch_2 // batch_1, (b // batch_2) % batch_1, b % batch_2)
    o_ptr += h.to(tl.int64) * o_strides[3] + n.to(tl.int64) * o_strides[4]
    tl.store(o_ptr + offs_dv * o_strides[5], out.to(o_ptr.dtype.element_ty), mask=offs_dv < DV)

"""The largest lengths of queries and keys, which say how far ALiBi reaches."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "H"])
def lengths_kernel(
    q_ptr, k_ptr, out_ptr, q_b, q_h, q_n, k_b, k_h, k_n, N, H,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Squares of the largest lengths of a head's queries, then keys, into (2, H) of zeros.

    As bits of fp32, among which NaN is the largest one: the order of positive numbers is that of
    their bits.
    """
    blocks = tl.cdiv(N, BLOCK)
    entry = tl.program_id(0) // blocks
    row = (tl.program_id(0) - entry * blocks) * BLOCK + tl.arange(0, BLOCK)
    b = entry // H
    h = entry - b * H
    inside = (row < N)[:, None]
    at = row[:, None].to(tl.int64)
    d = tl.arange(0, D)
    q_ptr += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k_ptr += b.to(tl.int64) * k_b + h.to(tl.int64) * k_h
    q = tl.load(q_ptr + at * q_n + d, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at * k_n + d, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_max(out_ptr + h, _bits(tl.sum(q * q, 1)))
    tl.atomic_max(out_ptr + H + h, _bits(tl.sum(k * k, 1)))


@triton.jit
def _bits(squares):
    return tl.max(squares.to(tl.int32, bitcast=True), 0)

"""The Triton kernel that makes the bias of a site from a pair representation."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def project_pairs_kernel(
    z_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, out_ptr,
    z_b, z_i, z_j, z_c, N, M, row, eps,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr, NORMS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[b, h, i, j] = weight[h] . norm(z[b, i, j]) + bias[h], a block of j at a time.

    Channels are normed in fp32 and rounded to the dtype of `out`, which the product is made in.
    Rows of `out` are `row` numbers apart.
    """
    blocks = tl.cdiv(M, BLOCK_J)
    pid = tl.program_id(0)
    i = (pid // blocks) % N
    b = (pid // blocks // N).to(tl.int64)
    j = (pid % blocks) * BLOCK_J + tl.arange(0, BLOCK_J)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    dtype = out_ptr.dtype.element_ty
    z_ptr += b * z_b + i.to(tl.int64) * z_i
    cells = z_ptr + j.to(tl.int64)[:, None] * z_j + c.to(tl.int64)[None, :] * z_c
    x = tl.load(cells, mask=(j < M)[:, None] & (c < C)[None, :], other=0.0)
    if NORMS:
        x = x.to(tl.float32)
        mean = tl.sum(x, 1) / C
        x = tl.where((c < C)[None, :], x - mean[:, None], 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
        if HAS_SCALE:
            x *= tl.load(scale_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        if HAS_SHIFT:
            x += tl.load(shift_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    inside = (h < H)[None, :] & (c < C)[:, None]
    weight = tl.load(weight_ptr + h[None, :] * C + c[:, None], mask=inside, other=0.0)
    out = tl.dot(x.to(dtype), weight.to(dtype), input_precision="ieee")
    if HAS_BIAS:
        out += tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    out_ptr += (b * H * N + i) * row
    heads = h.to(tl.int64)[:, None] * N * row
    tl.store(out_ptr + heads + j[None, :], tl.trans(out).to(dtype),
             mask=(h < H)[:, None] & (j < M)[None, :])  # fmt: skip

"""The Triton kernel that normalises the rows of k once, before all queries read them."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_steps import at


@triton.jit
def normalize_rows_kernel(
    x_ptr, out_ptr, x_strides, batch_1, batch_2, H, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of x (*batch, H, M, D) scaled to unit length in fp32, written contiguously."""
    blocks = tl.cdiv(M, ROWS)
    pid = tl.program_id(0)
    h = (pid // blocks) % H
    b = pid // blocks // H
    b2 = b % batch_2
    b1 = (b // batch_2) % batch_1
    b0 = b // batch_2 // batch_1
    rows = ((pid % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < M)[:, None] & (columns < D)[None, :]
    x_ptr = at(x_ptr, x_strides, b0, b1, b2) + h.to(tl.int64) * x_strides[3]
    cells = rows[:, None] * x_strides[4] + columns[None, :].to(tl.int64) * x_strides[5]
    x = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    x = x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)[:, None]
    out_ptr += (b * H + h).to(tl.int64) * M * D
    out = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], out, mask=inside)

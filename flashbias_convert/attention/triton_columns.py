"""The Triton kernels that write factors as other kernels read them, and their gradients back.

The torch functions in `factors` and `training_packing` that they stand in for take some forty small
steps, which cost the host more than the card. What is written is the same to the last bit.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class FactorWalk(NamedTuple):
    """A matrix (*batch, H, rows, columns), and the largest entries that belong to its columns.

    Strides are those of batch 0, 1, 2, heads, then rows and columns of the matrix itself; 0 where a
    dimension is shared.
    """

    rows: Any
    batch_1: Any
    batch_2: Any
    heads: Any
    strides: Any
    top_strides: Any


@triton.jit
def balance_power(top_q, top_k):
    """n, where 2^n is the power of two next to sqrt(top_k / top_q); see `factors.balance_step`.

    From the bits of the quotient: logarithms are approximate, and half-way cases are common.
    """
    ratio = tl.div_rn(top_k, tl.maximum(top_q, 2.0**-126))
    ratio = tl.minimum(tl.maximum(ratio, 2.0**-126), 2.0**126)
    ratio = tl.where((top_q > 0) & (top_k > 0), ratio, 1.0)
    bits = ratio.to(tl.int32, bitcast=True)
    power = (bits >> 23) - 127
    # 2^1, 2^5, 2^-3, ... lie half-way between two, of which the lower one is even
    down = ((bits & 0x7FFFFF) == 0) & ((power & 3) == 1)
    return (power + 1 - down.to(tl.int32)) >> 1


@triton.jit
def power_of_two(n):
    """2^n in fp32, for |n| <= 126."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def place(pid, walk, ROWS: tl.constexpr):
    """Rows of a program, which matrix they are of, and offsets of that and of its largest entries.

    Returns:
        rows (ROWS,), the number of the matrix, its head, and the two offsets.
    """
    blocks = tl.cdiv(walk.rows, ROWS)
    rows = ((pid % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lead = (pid // blocks).to(tl.int64)
    h = lead % walk.heads
    b = lead // walk.heads
    b0, b1, b2 = (
        b // walk.batch_2 // walk.batch_1,
        b // walk.batch_2 % walk.batch_1,
        b % walk.batch_2,
    )
    s, t = walk.strides, walk.top_strides
    own = b0 * s[0] + b1 * s[1] + b2 * s[2] + h * s[3]
    top = b0 * t[0] + b1 * t[1] + b2 * t[2] + h * t[3]
    return rows, lead, h, own, top


@triton.jit
def write_columns(
    phi, top_q, top_k, sizes, size, out, walk, pid, R, split,
    COLUMNS: tl.constexpr, LOW: tl.constexpr, DOWN: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write some rows of one factor; see `factor_columns_kernel`. DOWN: divide by the step."""
    rows, lead, h, own, top = place(pid, walk, ROWS)
    columns = tl.arange(0, COLUMNS)
    source = tl.where(columns < 3 * split, columns // 3, columns - 2 * split)
    here, inside = source < R, rows < walk.rows
    where = own + rows[:, None] * walk.strides[4] + source[None, :] * walk.strides[5]
    x = tl.load(phi + where, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
    if top_q is not None:
        n = balance_power(
            tl.load(top_q + top + source, mask=here, other=0.0),
            tl.load(top_k + top + source, mask=here, other=0.0),
        )
        x *= power_of_two(-n if DOWN else n)[None, :]
    if sizes is not None:
        x = tl.div_rn(x, tl.zeros_like(x) + tl.load(sizes + h))
    elif INVERSE:
        x *= size
    else:
        x = tl.div_rn(x, tl.zeros_like(x) + size)
    high = x.to(out.dtype.element_ty)
    low = (x - high.to(tl.float32)).to(out.dtype.element_ty)
    is_low = (columns < 3 * split) & (columns % 3 == LOW)
    to = (lead * walk.rows + rows)[:, None] * COLUMNS + columns[None, :]
    tl.store(out + to, tl.where(is_low[None, :], low, high), mask=inside[:, None])


@triton.jit(do_not_specialize=["programs_q", "R", "split"])
def factor_columns_kernel(
    phi_q, phi_k, top_q, top_k, sizes, q_out, k_out, size, walk_q, walk_k, programs_q, R, split,
    COLUMNS: tl.constexpr, LOW_Q: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Balance, scale and round both factors, and write their columns, the first `split` in three.

    Args:
        phi_q, phi_k: any strides; see the walks.
        top_q, top_k: largest entries by column, fp32; None for factors that need no balance.
        sizes: fp32 (H,), what phi_q of a head is divided by, or None.
        size: what phi_q is divided by without `sizes`.
        q_out, k_out: contiguous, COLUMNS wide, zero past the last column.
        programs_q: how many programs write q_out; all others write k_out.
        LOW_Q: which of three columns of q holds the low part, from 0; none for -1. That of k is 1.
        INVERSE: `size` is a reciprocal, by which torch multiplies where it divides by a number.
    """
    pid = tl.program_id(0)
    if pid < programs_q:
        write_columns(
            phi_q, top_q, top_k, sizes, size, q_out, walk_q, pid, R, split,
            COLUMNS, LOW_Q, False, INVERSE, ROWS,
        )  # fmt: skip
    else:
        write_columns(
            phi_k, top_q, top_k, None, 1.0, k_out, walk_k, pid - programs_q, R, split,
            COLUMNS, 1, True, True, ROWS,
        )  # fmt: skip


@triton.jit
def sum_parts(
    found, top_q, top_k, out, walk, pid, R, split,
    WIDTH: tl.constexpr, PARTNER: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write some rows of one factor's gradient; see `factor_gradients_kernel`."""
    rows, lead, _, own, top = place(pid, walk, ROWS)
    columns = tl.arange(0, WIDTH)
    front, here, inside = columns < split, columns < R, rows < walk.rows
    source = tl.where(front, 3 * columns, columns + 2 * split)
    where = found + own + rows[:, None] * walk.strides[4] + source[None, :] * walk.strides[5]
    present = inside[:, None] & here[None, :]
    x = tl.load(where, mask=present, other=0.0)
    partner = where + PARTNER * walk.strides[5]
    both = x + tl.load(partner, mask=present & front[None, :], other=0.0)
    x = tl.where(front[None, :], both, x)
    n = balance_power(
        tl.load(top_q + top + columns, mask=here, other=0.0),
        tl.load(top_k + top + columns, mask=here, other=0.0),
    )
    to = (lead * walk.rows + rows)[:, None] * R + columns[None, :]
    tl.store(out + to, x * power_of_two(-n if DOWN else n)[None, :], mask=present)


@triton.jit(do_not_specialize=["programs_q", "R", "split"])
def factor_gradients_kernel(
    q, k, top_q, top_k, q_out, k_out, walk_q, walk_k, programs_q, R, split,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of factors from those of the columns that `factor_columns_kernel` wrote.

    Args:
        q, k: fp32, gradients of the columns. One may be None, and then has no programs.
        top_q, top_k: as for `factor_columns_kernel`.
        q_out, k_out: fp32, contiguous, R wide.
        programs_q: how many programs write q_out; all others write k_out.
        WIDTH: a power of two, at least R.
    """
    pid = tl.program_id(0)
    if q is not None:  # noqa: SIM102 - decided when it is compiled
        if pid < programs_q:
            sum_parts(q, top_q, top_k, q_out, walk_q, pid, R, split, WIDTH, 1, False, ROWS)
    if k is not None:  # noqa: SIM102
        if pid >= programs_q:
            own = pid - programs_q
            sum_parts(k, top_q, top_k, k_out, walk_k, own, R, split, WIDTH, 2, True, ROWS)

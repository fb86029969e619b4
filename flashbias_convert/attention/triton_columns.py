"""The Triton kernels that write factors as other kernels read them, and their gradients back.

The torch functions in `factors` and `training_packing` that they stand in for take some forty small
steps, which cost the host more than the card. What is written is the same to the last bit.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import factors

SMALLEST_SCALE = tl.constexpr(factors.SMALLEST_SCALE)


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
def in_parts(x, is_low, dtype: tl.constexpr):
    """`x` rounded to `dtype`, or where `is_low` what that leaves of it."""
    high = x.to(dtype)
    low = (x - high.to(tl.float32)).to(dtype)
    return tl.where(is_low, low, high)


@triton.jit
def write_columns(
    pid, phi, top_q, top_k, scales, out, again, size, walk, R, split,
    COLUMNS: tl.constexpr, LOW: tl.constexpr, DOWN: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Balance, divide and round some rows of a factor, and write their columns.

    Args:
        pid: from 0 for this factor.
        phi: any strides; see `walk`.
        top_q, top_k: largest entries by column, fp32; None for factors that need no balance.
        scales: fp32 (H,), by whose size a head is divided, or None.
        out: contiguous, COLUMNS wide, zero past the last column.
        again: the same in another dtype, or None.
        size: what all heads are divided by without `scales`; None for nothing.
        R: columns of phi.
        LOW: which of three columns holds the low part, from 0; none for -1.
        DOWN: divide by the step, as keys are, and do not multiply.
        INVERSE: `size` is a reciprocal, by which torch multiplies where it divides by a number.
    """
    rows, lead, h, own, top = place(pid, walk, ROWS)
    columns = tl.arange(0, COLUMNS)
    source = tl.where(columns < 3 * split, columns // 3, columns - 2 * split).to(tl.int64)
    here, inside = source < R, rows < walk.rows
    where = own + rows[:, None] * walk.strides[4] + source[None, :] * walk.strides[5]
    x = tl.load(phi + where, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
    if top_q is not None:
        n = balance_power(
            tl.load(top_q + top + source, mask=here, other=0.0),
            tl.load(top_k + top + source, mask=here, other=0.0),
        )
        x *= power_of_two(-n if DOWN else n)[None, :]
    if scales is not None:
        own_size = tl.abs(tl.load(scales + h))
        own_size = tl.where(own_size < SMALLEST_SCALE, 1.0, own_size)
        x = tl.div_rn(x, tl.zeros_like(x) + own_size)
    elif size is not None:
        x = x * size if INVERSE else tl.div_rn(x, tl.zeros_like(x) + size)
    is_low = ((columns < 3 * split) & (columns % 3 == LOW))[None, :]
    to = (lead * walk.rows + rows)[:, None] * COLUMNS + columns[None, :]
    tl.store(out + to, in_parts(x, is_low, out.dtype.element_ty), mask=inside[:, None])
    if again is not None:
        tl.store(again + to, in_parts(x, is_low, again.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["R", "split", "programs_q"])
def factor_columns_kernel(
    phi_q, phi_k, top_q, top_k, scales, out_q, out_k, again_q, again_k, size, walk_q, walk_k,
    programs_q, R, split,
    COLUMNS: tl.constexpr, WHOLE: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns of both factors, the first `split` in three; see `write_columns`.

    The first `programs_q` programs write those of queries. WHOLE: their triples are the same number
    three times, of which the reader takes the parts.
    """
    pid = tl.program_id(0)
    if pid < programs_q:
        write_columns(
            pid, phi_q, top_q, top_k, scales, out_q, again_q, size, walk_q, R, split,
            COLUMNS, -1 if WHOLE else 2, False, INVERSE, ROWS,
        )  # fmt: skip
    else:
        write_columns(
            pid - programs_q, phi_k, top_q, top_k, None, out_k, again_k, None, walk_k, R, split,
            COLUMNS, 1, True, INVERSE, ROWS,
        )  # fmt: skip


@triton.jit
def write_gradient(
    pid, found, top_q, top_k, out, walk, R, split,
    WIDTH: tl.constexpr, PARTNER: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows of a factor from that of the columns that were written of them.

    Args:
        pid: from 0 for this factor.
        found: fp32, any strides; see `walk`.
        top_q, top_k, R, split, DOWN: as for `write_columns`.
        out: contiguous, R wide, in the dtype of the factor.
        WIDTH: a power of two, at least R.
        PARTNER: which of three columns is added to the first one.
    """
    rows, lead, _, own, top = place(pid, walk, ROWS)
    columns = tl.arange(0, WIDTH)
    front, here, inside = columns < split, columns < R, rows < walk.rows
    source = tl.where(front, 3 * columns, columns + 2 * split).to(tl.int64)
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


@triton.jit(do_not_specialize=["R", "split", "programs_q"])
def factor_gradients_kernel(
    found_q, found_k, top_q, top_k, out_q, out_k, walk_q, walk_k, programs_q, R, split,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of factors from those of the columns that `factor_columns_kernel` wrote.

    The first `programs_q` programs write those of queries; what belongs to a factor whose gradient
    is not wanted is None. See `write_gradient`.
    """
    pid = tl.program_id(0)
    # the outer conditions are those of the compiler: what is None is not to be compiled
    if found_q is not None:  # noqa: SIM102
        if pid < programs_q:
            write_gradient(
                pid, found_q, top_q, top_k, out_q, walk_q, R, split, WIDTH, 1, False, ROWS
            )
    if found_k is not None:  # noqa: SIM102
        if pid >= programs_q:
            write_gradient(
                pid - programs_q, found_k, top_q, top_k, out_k, walk_k, R, split,
                WIDTH, 2, True, ROWS,
            )  # fmt: skip

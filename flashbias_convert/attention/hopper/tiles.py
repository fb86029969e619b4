"""What one warpgroup does with a tile of scores, in Gluon: layouts, exponentials, masks.

A math warpgroup has 64 rows of queries. Scores, weights and sums stay in its registers, in the
layout in which the tensor cores leave them.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from . import rules

#: rows of a warpgroup
ROWS = gl.constexpr(rules.ROWS)


@gluon.constexpr_function
def product_layout(n):
    """Of a product (64, n) as the tensor cores leave it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def operand_layout(n):
    """Of a left factor in registers, of a product with n columns."""
    return gl.DotOperandLayout(0, product_layout(n), 2)


@gluon.jit
def exp2(x):
    """2^x to about two units in the last place, in one instruction; less than 2^-126 is zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """To bf16 or fp16 in pairs, which the compiler would pack once more if it made them."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def scores(q, pq, k, pk, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr):
    """Ask for q k^T + phi_q phi_k^T, (64, BN)."""
    s = gl.zeros([ROWS, BN], gl.float32, product_layout(BN))
    s = warpgroup_mma(q, k.reshape([BN, D]).permute([1, 0]), s, use_acc=False, is_async=True)
    if R > 0:
        s = warpgroup_mma(pq, pk.reshape([BN, R]).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def weighted(p, v, acc, BN: gl.constexpr, D: gl.constexpr):
    """Ask for acc + p v, (64, D)."""
    return warpgroup_mma(p, v.reshape([BN, D]), acc, is_async=True)


@gluon.jit
def hide_end(s, left, BN: gl.constexpr):
    """Minus infinity from column `left` on, where a sequence has ended."""
    columns = gl.arange(0, BN, gl.SliceLayout(0, product_layout(BN)))
    return gl.where(columns[None, :] < left, s, float("-inf"))


@gluon.jit
def weights(
    s, level, to_exp2, BN: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, QUICK: gl.constexpr
):
    """Softmax of a tile in units of the level of each row.

    Args:
        s: scores (64, BN), in units of the scale.
        level: largest scores so far, (64,).
        to_exp2: turns them into exponents of two.
        FIRST: there are none so far.
        QUICK: only the first tile sets the level.

    Returns:
        New levels, the same in exponents of two (zero where nothing is visible so far, lest minus
        infinity were taken from itself), weights in fp32 and their sums.
    """
    rows: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    near: gl.constexpr = gl.SliceLayout(1, product_layout(BN))
    top = level
    if FIRST or not QUICK:
        top = gl.convert_layout(gl.max(s, 1), rows, assert_trivial=True)
        if not FIRST:
            top = gl.maximum(level, top)
        if QUICK:
            # with a lower level usual scores would overflow
            top = gl.maximum(top, -24.0 / to_exp2)
    base = top * to_exp2
    if not QUICK:
        base = gl.where(top == float("-inf"), 0.0, base)
    p = exp2(s * to_exp2 - gl.convert_layout(base, near, assert_trivial=True)[:, None])
    return top, base, p, gl.convert_layout(gl.sum(p, 1), rows, assert_trivial=True)


@gluon.jit
def as_operand(p, dtype: gl.constexpr, D: gl.constexpr):
    """Weights as the left factor of a product with values."""
    return gl.convert_layout(narrow(p, dtype), operand_layout(D))

"""Device functions that the forward kernels share: reading, scores, and steps over the keys.

A step takes a tile of scores in. Careful steps follow the largest score of each row. Quick steps
look for no larger ones than the level that they start from; whether that was right shows in the
sums, and where it was not a block is computed once more. Limits are in units of the level: fp16
weights overflow, and are coarse below 2**-14. Names are those of `triton_forward`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: passes over the tiles of a row of blocks: those that the ends of the keys or causality cut, and
#: all others; a third one is for the others where the mask of the keys has holes
EDGES, INSIDE = tl.constexpr(0), tl.constexpr(1)
#: keys of a mask that are looked at together
MASK_BLOCK = tl.constexpr(1024)


@triton.jit
def at(ptr, strides, b0, b1, b2):
    """`ptr` moved to one batch entry; 64-bit, since offsets may pass 2**31."""
    return (
        ptr
        + b0.to(tl.int64) * strides[0]
        + b1.to(tl.int64) * strides[1]
        + b2.to(tl.int64) * strides[2]
    )


@triton.jit
def tile(ptrs, in_keys, in_columns, RAGGED_KEYS: tl.constexpr, RAGGED_COLUMNS: tl.constexpr):
    """Load a tile; what lies outside the tensor reads as zero."""
    if RAGGED_KEYS and RAGGED_COLUMNS:
        return tl.load(ptrs, mask=in_keys & in_columns, other=0.0)
    elif RAGGED_KEYS:
        return tl.load(ptrs, mask=in_keys, other=0.0)
    elif RAGGED_COLUMNS:
        return tl.load(ptrs, mask=in_columns, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def visible_range(mask_ptr, stride, end):
    """The first visible key, one past the last, and whether all between them are visible.

    Of the first `end` keys. Masks of padding are such ranges.
    """
    first, last, count = end, 0, 0
    keys = tl.arange(0, MASK_BLOCK)
    for s in range(0, end, MASK_BLOCK):
        where = s + keys
        seen = tl.load(mask_ptr + where.to(tl.int64) * stride, mask=where < end, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, where, end), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, where + 1, 0), 0))
        count += tl.sum(seen.to(tl.int32), 0)
    first = tl.minimum(first, last)
    return first, last, count == last - first


@triton.jit
def products(
    q, phi_q, k_ptrs, phi_k_ptrs, k_strides, phi_k_strides, first, offs_n, M, offs_d, size,
    D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, NATURAL: tl.constexpr,
    WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile but for terms that are added to them, (BM, BN): q k + phi_q phi_k."""
    # 64 bits where an offset may need them; they cost a little in every step
    far = tl.cast(first, tl.int64) if WIDE else first
    in_keys = (first + offs_n < M)[None, :]
    k = tile(k_ptrs + far * k_strides[4], in_keys, offs_d[:, None] < D, EDGE, D < BLOCK_D)
    x = tl.dot(q, k, input_precision="ieee")
    if NATURAL:
        x = x * size
    if COLUMNS > 0:
        phi_k = tile(phi_k_ptrs + far * phi_k_strides[4], in_keys, None, EDGE, False)
        x = tl.dot(phi_q, phi_k, x, input_precision="ieee")
    return x


@triton.jit
def weights(x, level, to_exp2, TRAINING: tl.constexpr):
    """2**((x - level) * to_exp2); x has the dimensions of level, or one more."""
    if len(x.shape) == 2:
        level = level[:, None]
    if TRAINING:
        # the backward pass takes the same differences, and rounds them alike
        return tl.exp2((x - level) * to_exp2)
    else:
        # one fused multiply-add each: only the difference is rounded
        return tl.exp2(x * to_exp2 - level * to_exp2)


@triton.jit
def follow(x, top, total, acc, to_exp2, TRAINING: tl.constexpr):
    """Levels that follow the largest score: the new ones, sums in their units, and weights of x."""
    new_top = tl.maximum(top, tl.max(x, 1))
    # where nothing is visible yet, -inf - -inf would be NaN
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = weights(x, level, to_exp2, TRAINING)
    shrink = weights(top, level, to_exp2, TRAINING)
    return new_top, total * shrink + tl.sum(p, 1), acc * shrink[:, None], p


@triton.jit
def raise_level(top, there_are_any, to_exp2, FP16: tl.constexpr):
    """What quick steps start from: a level so low that usual scores would overflow is raised."""
    LOWEST: tl.constexpr = -4.0 if FP16 else -24.0  # in units of the level
    return tl.maximum(top, tl.where(there_are_any, LOWEST / to_exp2, float("-inf")))


@triton.jit
def start_quick(top, raised, total, acc, to_exp2, seen, FP16: tl.constexpr):
    """Sums in units of the raised level, and the least total that will tell that it was right.

    Weights below 2**-14 lose bits in fp16: many of them, of `seen` keys, must not make up a sum.
    """
    LEAST: tl.constexpr = 0.5 if FP16 else 2.0**-20
    fewest = tl.maximum(LEAST, seen * 2.0**-13) if FP16 else LEAST
    least = tl.where(top == raised, LEAST, fewest)
    shrink = tl.where(top == raised, 1.0, tl.exp2((top - raised) * to_exp2))
    return total * shrink, acc * shrink[:, None], least


@triton.jit
def usual_rows(total, acc, least, FP16: tl.constexpr):
    """Whether the level of quick steps was right for each row."""
    LARGEST: tl.constexpr = 2.0**15 if FP16 else 2.0**60
    # `acc` can overflow where values are huge, too
    finite = tl.sum(tl.abs(acc), 1) < float("inf")
    return (total >= least) & (total <= LARGEST) & finite

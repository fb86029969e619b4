"""Steps of a math warpgroup over tiles of keys, in Gluon; see `kernel` for the barriers.

`given` is all that stays the same: q and phi_q, the rings of k, v, phi_k and a bias per key, their
barriers, the scale and what turns scores into exponents of two, `extra` (ALiBi's slope, and the
place of distance zero in a table by distance), the first query, and the length of the sequence.
`ring` has slots and phases of k and v, and the phase of the turn; `key` is the first key of a tile,
W the warpgroup.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .tiles import (
    ALIBI,
    add_bias,
    as_operand,
    before_scores,
    get,
    hide,
    row_shift,
    scores,
    weighted,
    weights,
)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and its phase."""
    stage = stage + 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def first_part(
    given, ring, level, key, W: gl.constexpr, n: gl.constexpr,
    FIRST: gl.constexpr, MASK: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Scores and weights of a tile, and nothing beside them."""
    q, pq, bufs, bars, numbers, extra, row, N = given
    k_full, k_empty, _v_full, _v_empty, turn = bars
    GROUPS: gl.constexpr = get(FORM, "GROUPS")
    scale, to_exp2 = numbers
    ks, kp, vs, vp, tp = ring
    mbarrier.wait(k_full.index(ks), kp)
    if get(FORM, "TURNS"):
        mbarrier.wait(turn.index(W), tp)
    s = scores(q, pq, bufs[0].index(ks), bufs[2].index(ks), n, FORM)
    if get(FORM, "TURNS"):
        mbarrier.arrive(turn.index((W + 1) % GROUPS))
        tp = tp ^ 1
    found = before_scores(extra, row, key, n, FORM)
    s = warpgroup_mma_wait(0, (s,))
    y = add_bias(s, found, bufs[3].index(ks), scale, n, FORM)
    mbarrier.arrive(k_empty.index(ks))
    if MASK:
        y = hide(y, row, key, N, n, FORM)
    shift = level
    if get(FORM, "BIAS") == ALIBI:
        shift = row_shift(extra[0], row, key, get(FORM, "HEAD"))
    top, p, total, shrink = weights(y, level, shift, to_exp2, n, FIRST, FORM)
    ks, kp = advance(ks, kp, get(FORM, "STAGES"))
    return top, p, total, shrink, (ks, kp, vs, vp, tp)


@gluon.jit
def last_part(p, given, ring, acc, n: gl.constexpr, FORM: gl.constexpr):
    """acc + p v, waited for."""
    bufs, bars = given[2], given[3]
    _k_full, _k_empty, v_full, v_empty, _turn = bars
    ks, kp, vs, vp, tp = ring
    mbarrier.wait(v_full.index(vs), vp)
    o = weighted(p, bufs[1].index(vs), acc, n, FORM)
    acc = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(v_empty.index(vs))
    vs, vp = advance(vs, vp, get(FORM, "STAGES"))
    return acc, (ks, kp, vs, vp, tp)


@gluon.jit
def join(acc, total, added, shrink, FIRST: gl.constexpr, FORM: gl.constexpr):
    """Results so far in units of the new level, and the sum of weights."""
    if FIRST:
        total = added
    elif get(FORM, "QUICK"):
        total = total + added
    else:
        acc = acc * shrink[:, None]
        total = total * shrink + added
    return acc, total


@gluon.jit
def whole_step(
    given, state, ring, key, W: gl.constexpr, dtype: gl.constexpr,
    n: gl.constexpr, FIRST: gl.constexpr, MASK: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """One tile of keys, and its product with values behind its weights."""
    acc, level, total = state
    top, p, added, shrink, ring = first_part(given, ring, level, key, W, n, FIRST, MASK, FORM)
    acc, total = join(acc, total, added, shrink, FIRST, FORM)
    p = as_operand(p, dtype, get(FORM, "HEAD"))
    acc, ring = last_part(p, given, ring, acc, n, FORM)
    return (acc, top, total), ring


@gluon.jit
def overlapped_step(
    given, state, ring, key, W: gl.constexpr, dtype: gl.constexpr,
    MASK: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The scores of one tile of keys, and the product of values and the weights before them."""
    q, pq, bufs, bars, numbers, extra, row, N = given
    k_full, k_empty, v_full, v_empty, turn = bars
    GROUPS: gl.constexpr = get(FORM, "GROUPS")
    BN: gl.constexpr = get(FORM, "KEYS")
    acc, level, total, p = state
    scale, to_exp2 = numbers
    ks, kp, vs, vp, tp = ring

    mbarrier.wait(k_full.index(ks), kp)
    if get(FORM, "TURNS"):
        mbarrier.wait(turn.index(W), tp)
    s = scores(q, pq, bufs[0].index(ks), bufs[2].index(ks), BN, FORM)
    mbarrier.wait(v_full.index(vs), vp)
    o = weighted(p, bufs[1].index(vs), acc, BN, FORM)
    if get(FORM, "TURNS"):
        mbarrier.arrive(turn.index((W + 1) % GROUPS))
        tp = tp ^ 1
    found = before_scores(extra, row, key, BN, FORM)
    s = warpgroup_mma_wait(1, (s,))  # the other product may still run
    y = add_bias(s, found, bufs[3].index(ks), scale, BN, FORM)
    mbarrier.arrive(k_empty.index(ks))
    if MASK:
        y = hide(y, row, key, N, BN, FORM)
    shift = level
    if get(FORM, "BIAS") == ALIBI:
        shift = row_shift(extra[0], row, key, get(FORM, "HEAD"))
    top, new, added, shrink = weights(y, level, shift, to_exp2, BN, False, FORM)
    # The assembler moves the wait for the product before the weights, and nothing overlaps, unless
    # a block of instructions ends between them: a wait for what has long been there.
    mbarrier.wait(v_full.index(vs), vp)
    acc, added, new = warpgroup_mma_wait(0, (o, added, new))
    # only now: the product has read the old ones from registers that these can have
    new = as_operand(new, dtype, get(FORM, "HEAD"))
    mbarrier.arrive(v_empty.index(vs))
    acc, total = join(acc, total, added, shrink, False, FORM)
    ks, kp = advance(ks, kp, get(FORM, "STAGES"))
    vs, vp = advance(vs, vp, get(FORM, "STAGES"))
    return (acc, top, total, new), (ks, kp, vs, vp, tp)


@gluon.jit
def skipped_step(given, ring, W: gl.constexpr, FORM: gl.constexpr):
    """A tile of which the warpgroup sees nothing: wait until it is there, and pass the turn on."""
    k_full, k_empty, v_full, v_empty, turn = given[3]
    ks, kp, vs, vp, tp = ring
    mbarrier.wait(k_full.index(ks), kp)
    if get(FORM, "TURNS"):
        mbarrier.wait(turn.index(W), tp)
        mbarrier.arrive(turn.index((W + 1) % get(FORM, "GROUPS")))
        tp = tp ^ 1
    mbarrier.arrive(k_empty.index(ks))
    mbarrier.wait(v_full.index(vs), vp)
    mbarrier.arrive(v_empty.index(vs))
    ks, kp = advance(ks, kp, get(FORM, "STAGES"))
    vs, vp = advance(vs, vp, get(FORM, "STAGES"))
    return (ks, kp, vs, vp, tp)

"""Math warpgroups, in Gluon; see `kernel` for the barriers and `steps` for names."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .items import first_key, first_width, unseen_tiles, work_item
from .steps import first_part, join, last_part, overlapped_step, skipped_step, whole_step
from .tiles import ALIBI, RISING, ROWS, as_operand, get, product_layout


@gluon.jit
def _whole(
    given, state, ring, t, tiles, last, W: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr
):
    """All tiles from the t-th on, each with its product with values behind its weights."""
    BN: gl.constexpr = get(FORM, "KEYS")
    TAIL: gl.constexpr = get(FORM, "TAIL")
    n: gl.constexpr = first_width(FORM, W)
    state, ring = whole_step(
        given, state, ring, first_key(t, last, FORM), W, dtype, n, True, True, FORM
    )
    full = tiles
    if not get(FORM, "CAUSAL"):
        full = gl.maximum(given[7] // BN, 1)
    for i in range(t + 1, full):
        state, ring = whole_step(
            given, state, ring, first_key(i, last, FORM), W, dtype, BN, False, False, FORM
        )
    if not get(FORM, "CAUSAL"):
        if TAIL > 0:
            state, ring = whole_step(
                given, state, ring, (tiles - 1) * BN, W, dtype, TAIL, False, True, FORM
            )
        else:
            for i in range(full, tiles):
                state, ring = whole_step(
                    given, state, ring, i * BN, W, dtype, BN, False, True, FORM
                )
    return state, ring


@gluon.jit
def _overlapped(
    given,
    state,
    ring,
    t,
    tiles,
    last,
    W: gl.constexpr,
    dtype: gl.constexpr,
    FIRST: gl.constexpr,
    FORM: gl.constexpr,
):
    """All tiles from the t-th on, each with its product with values in the step behind it."""
    BN: gl.constexpr = get(FORM, "KEYS")
    TAIL: gl.constexpr = get(FORM, "TAIL")
    acc, level, total = state
    top, p, added, shrink, ring = first_part(
        given, ring, level, first_key(t, last, FORM), W, BN, FIRST, FIRST, FORM
    )
    acc, total = join(acc, total, added, shrink, FIRST, FORM)
    state = (acc, top, total, as_operand(p, dtype, get(FORM, "HEAD")))
    full = tiles
    if not get(FORM, "CAUSAL"):
        full = gl.maximum(given[7] // BN, 1)
    for i in range(t + 1, full):
        state, ring = overlapped_step(
            given, state, ring, first_key(i, last, FORM), W, dtype, False, FORM
        )
    if not get(FORM, "CAUSAL") and TAIL == 0:
        for i in range(full, tiles):
            state, ring = overlapped_step(given, state, ring, i * BN, W, dtype, True, FORM)
    acc, level, total, p = state
    acc, ring = last_part(p, given, ring, acc, BN, FORM)
    state = (acc, level, total)
    if TAIL > 0:
        state, ring = whole_step(
            given, state, ring, (tiles - 1) * BN, W, dtype, TAIL, False, True, FORM
        )
    return state, ring


@gluon.jit
def _all_tiles(
    given, state, ring, tiles, last, W: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr
):
    t = 0
    for _i in gl.static_range(unseen_tiles(FORM, W)):
        ring = skipped_step(given, ring, W, FORM)
        t += 1
    if not get(FORM, "OVERLAP"):
        state, ring = _whole(given, state, ring, t, tiles, last, W, dtype, FORM)
    elif first_width(FORM, W) < get(FORM, "KEYS"):
        n: gl.constexpr = first_width(FORM, W)
        state, ring = whole_step(
            given, state, ring, first_key(t, last, FORM), W, dtype, n, True, True, FORM
        )
        if tiles > t + 1:
            state, ring = _overlapped(given, state, ring, t + 1, tiles, last, W, dtype, False, FORM)
    else:
        state, ring = _overlapped(given, state, ring, t, tiles, last, W, dtype, True, FORM)
    return state, ring


@gluon.jit
def _extra(bias_ptrs, h, FORM: gl.constexpr):
    """What of a bias belongs to a head, see `steps`; anything where there is nothing."""
    BIAS: gl.constexpr = get(FORM, "BIAS")
    slopes_ptr, table_ptr, table_step, codes_q_ptr, codes_k_ptr = bias_ptrs
    if BIAS == ALIBI:
        return (gl.load(slopes_ptr + h), h)
    elif BIAS >= RISING:
        zero = gl.load(codes_q_ptr) + gl.load(codes_k_ptr)
        return (h, table_ptr + h.to(gl.int64) * table_step + zero)
    else:
        return (h, h)


@gluon.jit
def _consume_item(
    work, ring, q_bufs, bufs, q_bars, bars, out, sizes, W: gl.constexpr, dtype: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """64 queries; `ring` has slots and phases of k and v, and phases of the turn and of q."""
    D: gl.constexpr = get(FORM, "HEAD")
    R: gl.constexpr = get(FORM, "COLUMNS")
    rows: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    ks, kp, vs, vp, tp, qp = ring
    q_full, q_empty = q_bars
    o_desc, scale, to_exp2, marks_ptr, bias_ptrs = out
    N, _H, _entries, _near, _works, _many, _reach = sizes
    first, b, h, tiles, last = work_item(work, sizes, FORM)
    row = first + W * ROWS
    extra = _extra(bias_ptrs, h, FORM)
    q = q_bufs[0].index(W).reshape([ROWS, D])
    pq = q
    if R > 0:
        pq = q_bufs[1].index(W).reshape([ROWS, R])
    mbarrier.wait(q_full, qp)
    given = (q, pq, bufs, bars, (scale, to_exp2), extra, row, N)
    nothing = gl.zeros([ROWS], gl.float32, rows)
    state = (gl.zeros([ROWS, D], gl.float32, product_layout(D)), nothing, nothing)
    state, ring = _all_tiles(
        given, state, (ks, kp, vs, vp, tp), tiles, last, W, dtype, FORM
    )  # fmt: skip
    acc, level, total = state
    ks, kp, vs, vp, tp = ring

    if get(FORM, "QUICK"):
        # where the level of the first tile was no good, the block is computed once more
        good = (total >= 2.0**-20) & (total <= 2.0**60) & (gl.sum(gl.abs(acc), 1) < float("inf"))
        where = marks_ptr + work + gl.zeros([ROWS], gl.int32, rows)
        gl.store(where, gl.full([ROWS], 1, gl.int32, rows), mask=good == 0)
    else:
        total = gl.where(level == float("-inf"), 1.0, total)  # rows that see nothing are zeros
    # the result goes out from where the queries were; rows past the end are left out of the copy
    q.store((acc * (1.0 / total)[:, None]).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [b, h, row, 0], q_bufs[0].index(W))
    tma.store_wait(0)
    mbarrier.arrive(q_empty)
    return (ks, kp, vs, vp, tp, qp ^ 1)


@gluon.jit
def consume(
    q_bufs, bufs, q_bars, bars, out, sizes, W: gl.constexpr, dtype: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    zero = gl.to_tensor(0)
    ring = (zero, zero, zero, zero, gl.to_tensor(1 if W == 0 else 0), zero)
    if get(FORM, "AGAIN"):
        for work in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
            if gl.load(out[3] + work) != 0:
                ring = _consume_item(
                    work, ring, q_bufs, bufs, q_bars, bars, out, sizes, W, dtype, FORM
                )
    else:
        _consume_item(
            gl.program_id(0), ring, q_bufs, bufs, q_bars, bars, out, sizes, W, dtype, FORM
        )

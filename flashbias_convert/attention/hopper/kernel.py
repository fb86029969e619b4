"""Attention forward for Hopper in Gluon: one warp copies, two warpgroups compute in turns.

The structure is that of FlashAttention-3 (Shah et al., 2024), with the factors of a bias as a
second product into the same scores (FlashBias, section 3.2). A producer warp copies tiles of k,
phi_k and v with TMA into two rings of shared memory. Each of two math warpgroups owns 64 queries;
the product of its weights and v runs while its next weights are computed, and the warpgroups take
turns to ask for products, so that one computes exponentials while the other keeps the tensor cores
busy.

Barriers ("parity p passes" if the phase before the running one has parity p, so on a fresh barrier
parity 1 passes at once and parity 0 waits for the first completion):

  q_full       count 1  producer: expect + copies. Consumers wait for parity u & 1 in work item u.
  q_empty      count 2  a consumer, when its result, which takes the place of its q, has been copied
                        out. The producer waits for parity (u & 1) ^ 1 before it copies q of item u.
  k_full[s]    count 1  producer: expect + copies of tile t into slot s = t % STAGES. Consumers wait
  v_full[s]             for parity (t // STAGES) & 1.
  k_empty[s]   count 2  a consumer, when the product that reads the slot has ended. The producer
  v_empty[s]            waits for parity ((t // STAGES) & 1) ^ 1 before it copies tile t.
  turn[w]      count 1  warpgroup w waits before it asks for the products of its step i, and the
                        other arrives when it has asked for its own; the first one starts: parity
                        i & 1 for w = 1, (i & 1) ^ 1 for w = 0.

t and i count over all work items of a program, so phases go on from one to the next. Both
warpgroups take the same number of steps in a work item. The producer's order is the consumers'
order: q, K0, K1, V0, K2, V1, ..., V last.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from . import rules
from .tiles import ROWS, as_operand, exp2, hide_end, product_layout, scores, weighted, weights

#: math warpgroups, queries of a program, and most marks that one of the second pass looks at
GROUPS = gl.constexpr(2)
BLOCK_M = gl.constexpr(rules.BLOCK_M)
MARKS = gl.constexpr(rules.MARKS)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage = stage + 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _item(work, sizes):
    """First query, batch entry and head; blocks of a head are side by side, to share its keys."""
    N, H, _works, _many = sizes
    blocks = gl.cdiv(N, BLOCK_M)
    entry = work // blocks
    b = entry // H
    return (work - entry * blocks) * BLOCK_M, b, entry - b * H


# -- producer ------------------------------------------------------------------------------


@gluon.jit
def _copy_queries(descs, bufs, full, first, b, h, many, D: gl.constexpr, R: gl.constexpr):
    mbarrier.expect(full, BLOCK_M * (D + R) * 2)
    for w in gl.static_range(GROUPS):
        row = first + w * ROWS
        tma.async_copy_global_to_shared(descs[0], [b, h, row, 0], full, bufs[0].index(w))
        if R > 0:
            at = [b * many[0], h * many[1], row, 0]
            tma.async_copy_global_to_shared(descs[1], at, full, bufs[1].index(w))


@gluon.jit
def _copy_keys(
    descs, bufs, full, row, b, h, many, s, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr
):
    bar = full.index(s)
    mbarrier.expect(bar, BN * (D + R) * 2)
    tma.async_copy_global_to_shared(descs[2], [b, h, row, 0], bar, bufs[2].index(s))
    if R > 0:
        at = [b * many[2], h * many[3], row, 0]
        tma.async_copy_global_to_shared(descs[4], at, bar, bufs[4].index(s))


@gluon.jit
def _copy_values(descs, bufs, full, row, b, h, s, BN: gl.constexpr, D: gl.constexpr):
    bar = full.index(s)
    mbarrier.expect(bar, BN * D * 2)
    tma.async_copy_global_to_shared(descs[3], [b, h, row, 0], bar, bufs[3].index(s))


@gluon.jit
def _produce_item(
    work, ring, descs, bufs, bars, sizes,
    BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ks, kp, vs, vp, qp = ring
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turn = bars
    N, _H, _works, many = sizes
    first, b, h = _item(work, sizes)
    mbarrier.wait(q_empty, qp ^ 1)
    _copy_queries(descs, bufs, q_full, first, b, h, many, D, R)
    tiles = gl.cdiv(N, BN)
    for t in range(0, tiles):
        mbarrier.wait(k_empty.index(ks), kp ^ 1)
        _copy_keys(descs, bufs, k_full, t * BN, b, h, many, ks, BN, D, R)
        ks, kp = _advance(ks, kp, STAGES)
        if t > 0:  # one behind the keys
            mbarrier.wait(v_empty.index(vs), vp ^ 1)
            _copy_values(descs, bufs, v_full, (t - 1) * BN, b, h, vs, BN, D)
            vs, vp = _advance(vs, vp, STAGES)
    mbarrier.wait(v_empty.index(vs), vp ^ 1)
    _copy_values(descs, bufs, v_full, (tiles - 1) * BN, b, h, vs, BN, D)
    vs, vp = _advance(vs, vp, STAGES)
    return (ks, kp, vs, vp, qp ^ 1)


@gluon.jit
def _produce(
    descs, bufs, bars, marks_ptr, sizes, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    _N, _H, works, _many = sizes
    zero = gl.to_tensor(0)
    ring = (zero, zero, zero, zero, zero)
    if AGAIN:
        for work in range(gl.program_id(0), works, gl.num_programs(0)):
            if gl.load(marks_ptr + work) != 0:
                ring = _produce_item(work, ring, descs, bufs, bars, sizes, BN, D, R, STAGES)
    else:
        _produce_item(gl.program_id(0), ring, descs, bufs, bars, sizes, BN, D, R, STAGES)


# -- consumers -----------------------------------------------------------------------------


@gluon.jit
def _step(
    q, pq, bufs, bars, state, ring, left, to_exp2, W: gl.constexpr, dtype: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    QUICK: gl.constexpr,
):  # fmt: skip
    """The scores of one tile of keys, and the product of values and the weights before them."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    acc, level, total, p = state
    ks, kp, vs, vp, tp = ring

    mbarrier.wait(k_full.index(ks), kp)
    mbarrier.wait(turn.index(W), tp)
    s = scores(q, pq, bufs[2].index(ks), bufs[4].index(ks), BN, D, R)
    mbarrier.wait(v_full.index(vs), vp)
    o = weighted(p, bufs[3].index(vs), acc, BN, D)
    mbarrier.arrive(turn.index((W + 1) % GROUPS))
    tp = tp ^ 1
    s = warpgroup_mma_wait(1, (s,))  # the other product may still run
    mbarrier.arrive(k_empty.index(ks))
    if MASK:
        s = hide_end(s, left, BN)
    top, base, new, added = weights(s, level, to_exp2, BN, D, False, QUICK)
    # The assembler moves the wait for the product before the weights, and nothing overlaps, unless
    # a block of instructions ends between them: a wait for what has long been there.
    mbarrier.wait(v_full.index(vs), vp)
    acc, added, new = warpgroup_mma_wait(0, (o, added, new))
    # only now: the product has read the old ones from registers that these can have
    new = as_operand(new, dtype, D)
    mbarrier.arrive(v_empty.index(vs))
    if QUICK:
        total = total + added
    else:
        shrink = exp2(level * to_exp2 - base)
        acc = acc * shrink[:, None]
        total = total * shrink + added
    ks, kp = _advance(ks, kp, STAGES)
    vs, vp = _advance(vs, vp, STAGES)
    return (acc, top, total, new), (ks, kp, vs, vp, tp)


@gluon.jit
def _consume_item(
    work, ring, bufs, bars, out, sizes, W: gl.constexpr, dtype: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
    QUICK: gl.constexpr,
):  # fmt: skip
    """64 queries; `ring` has slots and phases of k and v, and phases of the turn and of q."""
    ks, kp, vs, vp, tp, qp = ring
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    o_desc, to_exp2, marks_ptr = out
    N, _H, _works, _many = sizes
    rows: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    first, b, h = _item(work, sizes)
    q = bufs[0].index(W).reshape([ROWS, D])
    pq = q
    if R > 0:
        pq = bufs[1].index(W).reshape([ROWS, R])
    tiles = gl.cdiv(N, BN)
    mbarrier.wait(q_full, qp)

    # the first tile, which sets the level
    mbarrier.wait(k_full.index(ks), kp)
    mbarrier.wait(turn.index(W), tp)
    s = scores(q, pq, bufs[2].index(ks), bufs[4].index(ks), BN, D, R)
    mbarrier.arrive(turn.index((W + 1) % GROUPS))
    tp = tp ^ 1
    s = warpgroup_mma_wait(0, (s,))
    mbarrier.arrive(k_empty.index(ks))
    ks, kp = _advance(ks, kp, STAGES)
    s = hide_end(s, N, BN)
    start = gl.zeros([ROWS], gl.float32, rows)
    level, _base, p, total = weights(s, start, to_exp2, BN, D, True, QUICK)
    p = as_operand(p, dtype, D)
    acc = gl.zeros([ROWS, D], gl.float32, product_layout(D))

    state = (acc, level, total, p)
    ring = (ks, kp, vs, vp, tp)
    full = gl.maximum(N // BN, 1)
    for _t in range(1, full):
        state, ring = _step(
            q, pq, bufs, bars, state, ring, 0, to_exp2, W, dtype, BN, D, R, STAGES, False, QUICK
        )
    for t in range(full, tiles):
        state, ring = _step(
            q, pq, bufs, bars, state, ring, N - t * BN, to_exp2, W, dtype, BN, D, R, STAGES, True,
            QUICK,
        )  # fmt: skip
    acc, level, total, p = state
    ks, kp, vs, vp, tp = ring
    mbarrier.wait(v_full.index(vs), vp)
    o = weighted(p, bufs[3].index(vs), acc, BN, D)
    acc = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(v_empty.index(vs))
    vs, vp = _advance(vs, vp, STAGES)

    if QUICK:
        # where the level of the first tile was no good, the block is computed once more
        good = (total >= 2.0**-20) & (total <= 2.0**60) & (gl.sum(gl.abs(acc), 1) < float("inf"))
        where = marks_ptr + work + gl.zeros([ROWS], gl.int32, rows)
        gl.store(where, gl.full([ROWS], 1, gl.int32, rows), mask=good == 0)
    # the result goes out from where the queries were; rows past the end are left out of the copy
    if not QUICK:
        total = gl.where(total == 0.0, 1.0, total)  # rows that see nothing are zeros
    q.store((acc * (1.0 / total)[:, None]).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [b, h, first + W * ROWS, 0], bufs[0].index(W))
    tma.store_wait(0)
    mbarrier.arrive(q_empty)
    return (ks, kp, vs, vp, tp, qp ^ 1)


@gluon.jit
def _consume(
    bufs, bars, out, sizes, W: gl.constexpr, dtype: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, QUICK: gl.constexpr,
    AGAIN: gl.constexpr,
):  # fmt: skip
    _N, _H, works, _many = sizes
    zero = gl.to_tensor(0)
    ring = (zero, zero, zero, zero, gl.to_tensor(1 if W == 0 else 0), zero)
    if AGAIN:
        for work in range(gl.program_id(0), works, gl.num_programs(0)):
            if gl.load(out[2] + work) != 0:
                ring = _consume_item(
                    work, ring, bufs, bars, out, sizes, W, dtype, BN, D, R, STAGES, QUICK
                )
    else:
        _consume_item(
            gl.program_id(0), ring, bufs, bars, out, sizes, W, dtype, BN, D, R, STAGES, QUICK
        )


# -- kernel --------------------------------------------------------------------------------


@gluon.jit
def _slots(desc, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def _barrier(COUNT: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    return bar


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["N", "H", "works", "many_qb", "many_qh", "many_kb", "many_kh"])
def attention_kernel(
    q_desc, phi_q_desc, k_desc, v_desc, phi_k_desc, o_desc, marks_ptr,
    to_exp2, N, H, works, many_qb, many_qh, many_kb, many_kh,
    BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
    QUICK: gl.constexpr, AGAIN: gl.constexpr,
    MATH_REGS: gl.constexpr, COPY_REGS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """softmax(scale q k^T + phi_q phi_k^T) v of as many queries as keys.

    Args:
        q_desc, k_desc, v_desc, o_desc: (B, H, N, D), in tiles of 64 rows of q and o, BN of k and v.
        phi_q_desc, phi_k_desc: (B or 1, H or 1, N, R), phi_q divided by the scale.
        marks_ptr: int32, one for each block of 128 queries, zeros before the first pass.
        to_exp2: the scale times log2(e).
        works: number of these blocks.
        many_qb, many_qh, many_kb, many_kh: 1 where factors have that many batch entries, or heads,
            0 where they have one for all.
        QUICK: levels are those of the first tile; blocks where that is no good are marked.
        AGAIN: compute only blocks that are marked, several in a program.
    """
    dtype: gl.constexpr = q_desc.dtype
    if AGAIN:
        # most often none of its blocks is marked, and a program ends here
        own = gl.arange(0, MARKS, gl.BlockedLayout([1], [32], [num_warps], [0]))
        own = gl.program_id(0) + own * gl.num_programs(0)
        marks = gl.load(marks_ptr + own, mask=own < works, other=0)
        works = gl.where(gl.max(marks, 0) > 0, works, 0)
    q_buf = _slots(q_desc, GROUPS)
    k_buf, v_buf = _slots(k_desc, STAGES), _slots(v_desc, STAGES)
    pq_buf, pk_buf = q_buf, k_buf
    if R > 0:
        pq_buf, pk_buf = _slots(phi_q_desc, GROUPS), _slots(phi_k_desc, STAGES)
    bars = (
        _barrier(1), _barrier(GROUPS), _barriers(STAGES, 1), _barriers(STAGES, GROUPS),
        _barriers(STAGES, 1), _barriers(STAGES, GROUPS), _barriers(GROUPS, 1),
    )  # fmt: skip
    descs = (q_desc, phi_q_desc, k_desc, v_desc, phi_k_desc)
    bufs = (q_buf, pq_buf, k_buf, v_buf, pk_buf)
    out = (o_desc, to_exp2, marks_ptr)
    sizes = (N, H, works, (many_qb, many_qh, many_kb, many_kh))
    gl.warp_specialize(
        [
            (_consume, (bufs, bars, out, sizes, 0, dtype, BN, D, R, STAGES, QUICK, AGAIN)),
            (_consume, (bufs, bars, out, sizes, 1, dtype, BN, D, R, STAGES, QUICK, AGAIN)),
            (_produce, (descs, bufs, bars, marks_ptr, sizes, BN, D, R, STAGES, AGAIN)),
        ],
        [num_warps, 1], [MATH_REGS, COPY_REGS],
    )  # fmt: skip

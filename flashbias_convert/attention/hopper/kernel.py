"""Attention forward for Hopper in Gluon: one warp copies, warpgroups compute.

The structure is that of FlashAttention-3 (Shah et al., 2024), with the factors of a bias as a
second product into the same scores (FlashBias, section 3.2). A producer warp copies tiles of k,
phi_k, a bias per key and v with TMA into two rings of shared memory. Each math warpgroup owns 64
queries. Forms differ in what hides exponentials: the product of weights and values runs while the
next weights are computed, and two warpgroups take turns to ask for products, so that one computes
exponentials while the other keeps the tensor cores busy; or two programs run beside each other.

Causal calls go from the diagonal down to the first tile, so that the first one, which sets the
level of a row, has its query's own key. Long rows begin first.

Barriers ("parity p passes" if the phase before the running one has parity p, so on a fresh barrier
parity 1 passes at once and parity 0 waits for the first completion):

  q_full       count 1  producer: expect + copies. Consumers wait for parity u & 1 in work item u.
  q_empty      GROUPS   a consumer, when its result, which takes the place of its q, has been copied
                        out. The producer waits for parity (u & 1) ^ 1 before it copies q of item u.
  k_full[s]    count 1  producer: expect + copies of tile t into slot s = t % STAGES. Consumers wait
  v_full[s]             for parity (t // STAGES) & 1.
  k_empty[s]   GROUPS   a consumer, when the product that reads the slot has ended. The producer
  v_empty[s]            waits for parity ((t // STAGES) & 1) ^ 1 before it copies tile t.
  turn[w]      count 1  warpgroup w waits before it asks for the products of its step i, and the
                        other arrives when it has asked for its own; the first one starts: parity
                        i & 1 for w = 1, (i & 1) ^ 1 for w = 0.

t and i count over all work items of a program, so phases go on from one to the next. All
warpgroups take the same number of steps in a work item: one that sees nothing of a tile waits
until it is there and lets it go. With overlap the producer's order is the consumers' order: q, K0,
K1, V0, K2, V1, ..., V last; without, it is q, K0, V0, K1, V1, ...
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from . import rules
from .steps import (
    advance,
    as_operand,
    first_part,
    get,
    join,
    last_part,
    overlapped_step,
    skipped_step,
    whole_step,
)
from .tiles import ALIBI, KEY_BIAS, ROWS, product_layout

#: most marks that a program of the second pass looks at
MARKS = gl.constexpr(rules.MARKS)
LOG2E = gl.constexpr(rules.LOG2E)


@gluon.constexpr_function
def _first_width(form, w):
    """Columns of the first tile of which warpgroup w sees some."""
    w, keys, groups = int(getattr(w, "value", w)), get(form, "KEYS"), get(form, "GROUPS")
    if not get(form, "CAUSAL") or groups * 64 % keys or keys <= 64:
        return keys
    return w * 64 % keys + 64


@gluon.constexpr_function
def _unseen(form, w):
    """First tiles of a causal block of queries of which warpgroup w sees nothing."""
    w, keys, groups = int(getattr(w, "value", w)), get(form, "KEYS"), get(form, "GROUPS")
    if not get(form, "CAUSAL") or groups * 64 % keys:
        return 0
    return groups * 64 // keys - 1 - w * 64 // keys


@gluon.jit
def _item(work, sizes, FORM: gl.constexpr):
    """First query, batch entry, head, number of tiles, and the tile behind the last key.

    Blocks of a head are side by side, to share its keys. Causal: the longest ones of `near` heads
    come first, then shorter ones of the same, since the cache holds keys of as many.
    """
    N, H, entries, near, _works, _many, reach = sizes
    BM: gl.constexpr = get(FORM, "GROUPS") * ROWS
    BN: gl.constexpr = get(FORM, "KEYS")
    blocks = gl.cdiv(N, BM)
    if get(FORM, "CAUSAL"):
        section = work // (near * blocks)
        rest = work - section * (near * blocks)
        heads = gl.minimum(near, entries - section * near)
        turn = rest // heads
        first = (blocks - 1 - turn) * BM
        entry = section * near + rest - turn * heads
        tiles = gl.cdiv(first + BM, BN)
    else:
        entry = work // blocks
        first = (work - entry * blocks) * BM
        tiles = gl.cdiv(N, BN)
    b = entry // H
    h = entry - b * H
    last = tiles
    if get(FORM, "REACH"):
        # Of keys so far away from a query no weight is left: no score is larger than the product of
        # the largest lengths, so that theirs are less than 2^-40 of that of a query's own key.
        slopes_ptr, lengths_ptr, scale = reach
        slope = gl.load(slopes_ptr + h) * LOG2E
        size = gl.sqrt(gl.load(lengths_ptr + h)) * gl.sqrt(gl.load(lengths_ptr + H + h))
        far = (2.001 * scale * LOG2E * size + 41.0) / slope
        far = gl.where((slope > 0.0) & (far < 1e9), far, 1e9).to(gl.int32)
        tiles = last - gl.maximum(first - far, 0) // BN
    return first, b, h, tiles, last


@gluon.jit
def _key(t, last, FORM: gl.constexpr):
    """First key of the t-th tile in the order of the steps."""
    if get(FORM, "CAUSAL"):
        return (last - 1 - t) * get(FORM, "KEYS")
    else:
        return t * get(FORM, "KEYS")


# -- producer ------------------------------------------------------------------------------


@gluon.jit
def _copy_queries(descs, q_bufs, full, first, b, h, many, FORM: gl.constexpr):
    R: gl.constexpr = get(FORM, "COLUMNS")
    GROUPS: gl.constexpr = get(FORM, "GROUPS")
    mbarrier.expect(full, GROUPS * ROWS * (get(FORM, "HEAD") + R) * 2)
    for w in gl.static_range(GROUPS):
        row = first + w * ROWS
        tma.async_copy_global_to_shared(descs[0], [b, h, row, 0], full, q_bufs[0].index(w))
        if R > 0:
            at = [b * many[0], h * many[1], row, 0]
            tma.async_copy_global_to_shared(descs[1], at, full, q_bufs[1].index(w))


@gluon.jit
def _copy_keys(descs, bufs, full, key, b, h, many, s, FORM: gl.constexpr):
    BN: gl.constexpr = get(FORM, "KEYS")
    R: gl.constexpr = get(FORM, "COLUMNS")
    bar = full.index(s)
    extra: gl.constexpr = BN * 4 if get(FORM, "BIAS") == KEY_BIAS else 0
    mbarrier.expect(bar, BN * (get(FORM, "HEAD") + R) * 2 + extra)
    tma.async_copy_global_to_shared(descs[2], [b, h, key, 0], bar, bufs[0].index(s))
    if R > 0:
        at = [b * many[2], h * many[3], key, 0]
        tma.async_copy_global_to_shared(descs[4], at, bar, bufs[2].index(s))
    if get(FORM, "BIAS") == KEY_BIAS:
        row = b * many[4] + h * many[5]
        tma.async_copy_global_to_shared(descs[5], [row, key], bar, bufs[3].index(s))


@gluon.jit
def _copy_values(descs, bufs, full, key, b, h, s, FORM: gl.constexpr):
    bar = full.index(s)
    mbarrier.expect(bar, get(FORM, "KEYS") * get(FORM, "HEAD") * 2)
    tma.async_copy_global_to_shared(descs[3], [b, h, key, 0], bar, bufs[1].index(s))


@gluon.jit
def _produce_item(work, ring, descs, q_bufs, bufs, q_bars, bars, sizes, FORM: gl.constexpr):
    ks, kp, vs, vp, qp = ring
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty, _turn = bars
    _N, _H, _entries, _near, _works, many, _reach = sizes
    STAGES: gl.constexpr = get(FORM, "STAGES")
    OVERLAP: gl.constexpr = get(FORM, "OVERLAP")
    first, b, h, tiles, last = _item(work, sizes, FORM)
    mbarrier.wait(q_empty, qp ^ 1)
    _copy_queries(descs, q_bufs, q_full, first, b, h, many, FORM)
    for t in range(0, tiles):
        mbarrier.wait(k_empty.index(ks), kp ^ 1)
        _copy_keys(descs, bufs, k_full, _key(t, last, FORM), b, h, many, ks, FORM)
        ks, kp = advance(ks, kp, STAGES)
        if OVERLAP:
            if t > 0:  # one behind the keys
                mbarrier.wait(v_empty.index(vs), vp ^ 1)
                _copy_values(descs, bufs, v_full, _key(t - 1, last, FORM), b, h, vs, FORM)
                vs, vp = advance(vs, vp, STAGES)
        else:
            mbarrier.wait(v_empty.index(vs), vp ^ 1)
            _copy_values(descs, bufs, v_full, _key(t, last, FORM), b, h, vs, FORM)
            vs, vp = advance(vs, vp, STAGES)
    if OVERLAP:
        mbarrier.wait(v_empty.index(vs), vp ^ 1)
        _copy_values(descs, bufs, v_full, _key(tiles - 1, last, FORM), b, h, vs, FORM)
        vs, vp = advance(vs, vp, STAGES)
    return (ks, kp, vs, vp, qp ^ 1)


@gluon.jit
def _produce(descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM: gl.constexpr):
    zero = gl.to_tensor(0)
    ring = (zero, zero, zero, zero, zero)
    if get(FORM, "AGAIN"):
        for work in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
            if gl.load(marks_ptr + work) != 0:
                ring = _produce_item(work, ring, descs, q_bufs, bufs, q_bars, bars, sizes, FORM)
    else:
        _produce_item(gl.program_id(0), ring, descs, q_bufs, bufs, q_bars, bars, sizes, FORM)


# -- consumers -----------------------------------------------------------------------------


@gluon.jit
def _whole(
    q, pq, bufs, bars, state, ring, numbers, row, t, tiles, last, N, W: gl.constexpr,
    dtype: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """All tiles from the t-th on, each with its product with values behind its weights."""
    BN: gl.constexpr = get(FORM, "KEYS")
    TAIL: gl.constexpr = get(FORM, "TAIL")
    n: gl.constexpr = _first_width(FORM, W)
    state, ring = whole_step(
        q, pq, bufs, bars, state, ring, numbers, row, _key(t, last, FORM), N, W, dtype, n, True,
        True, FORM,
    )  # fmt: skip
    full = tiles
    if not get(FORM, "CAUSAL"):
        full = gl.maximum(N // BN, 1)
    for i in range(t + 1, full):
        state, ring = whole_step(
            q, pq, bufs, bars, state, ring, numbers, row, _key(i, last, FORM), N, W, dtype, BN,
            False, False, FORM,
        )  # fmt: skip
    if not get(FORM, "CAUSAL"):
        if TAIL > 0:
            state, ring = whole_step(
                q, pq, bufs, bars, state, ring, numbers, row, (tiles - 1) * BN, N, W, dtype, TAIL,
                False, True, FORM,
            )  # fmt: skip
        else:
            for i in range(full, tiles):
                state, ring = whole_step(
                    q, pq, bufs, bars, state, ring, numbers, row, i * BN, N, W, dtype, BN, False,
                    True, FORM,
                )  # fmt: skip
    return state, ring


@gluon.jit
def _overlapped(
    q, pq, bufs, bars, state, ring, numbers, row, t, tiles, last, N, W: gl.constexpr,
    dtype: gl.constexpr, FIRST: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """All tiles from the t-th on, each with its product with values in the step behind it."""
    BN: gl.constexpr = get(FORM, "KEYS")
    acc, level, total = state
    top, p, added, shrink, ring = first_part(
        q, pq, bufs, bars, ring, level, numbers, row, _key(t, last, FORM), N, W, BN, FIRST, FIRST,
        FORM,
    )  # fmt: skip
    acc, total = join(acc, total, added, shrink, FIRST, FORM)
    state = (acc, top, total, as_operand(p, dtype, get(FORM, "HEAD")))
    full = tiles
    if not get(FORM, "CAUSAL"):
        full = gl.maximum(N // BN, 1)
    for i in range(t + 1, full):
        state, ring = overlapped_step(
            q, pq, bufs, bars, state, ring, numbers, row, _key(i, last, FORM), N, W, dtype, False,
            FORM,
        )  # fmt: skip
    if not get(FORM, "CAUSAL"):
        for i in range(full, tiles):
            state, ring = overlapped_step(
                q, pq, bufs, bars, state, ring, numbers, row, i * BN, N, W, dtype, True, FORM
            )
    acc, level, total, p = state
    acc, ring = last_part(p, bufs, bars, ring, acc, BN, FORM)
    return (acc, level, total), ring


@gluon.jit
def _all_tiles(
    q, pq, bufs, bars, state, ring, numbers, row, tiles, last, N, W: gl.constexpr,
    dtype: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    t = 0
    for _i in gl.static_range(_unseen(FORM, W)):
        ring = skipped_step(bars, ring, W, FORM)
        t += 1
    if not get(FORM, "OVERLAP"):
        state, ring = _whole(
            q, pq, bufs, bars, state, ring, numbers, row, t, tiles, last, N, W, dtype, FORM
        )
    elif _first_width(FORM, W) < get(FORM, "KEYS"):
        n: gl.constexpr = _first_width(FORM, W)
        state, ring = whole_step(
            q, pq, bufs, bars, state, ring, numbers, row, _key(t, last, FORM), N, W, dtype, n,
            True, True, FORM,
        )  # fmt: skip
        if tiles > t + 1:
            state, ring = _overlapped(
                q, pq, bufs, bars, state, ring, numbers, row, t + 1, tiles, last, N, W, dtype,
                False, FORM,
            )  # fmt: skip
    else:
        state, ring = _overlapped(
            q, pq, bufs, bars, state, ring, numbers, row, t, tiles, last, N, W, dtype, True, FORM
        )
    return state, ring


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
    o_desc, scale, to_exp2, marks_ptr, slopes_ptr = out
    N, _H, _entries, _near, _works, _many, _reach = sizes
    first, b, h, tiles, last = _item(work, sizes, FORM)
    row = first + W * ROWS
    slope = to_exp2
    if get(FORM, "BIAS") == ALIBI:
        slope = gl.load(slopes_ptr + h)
    q = q_bufs[0].index(W).reshape([ROWS, D])
    pq = q
    if R > 0:
        pq = q_bufs[1].index(W).reshape([ROWS, R])
    mbarrier.wait(q_full, qp)
    nothing = gl.zeros([ROWS], gl.float32, rows)
    state = (gl.zeros([ROWS, D], gl.float32, product_layout(D)), nothing, nothing)
    state, ring = _all_tiles(
        q, pq, bufs, bars, state, (ks, kp, vs, vp, tp), (scale, to_exp2, slope), row, tiles, last,
        N, W, dtype, FORM,
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
def _consume(
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


@gluon.jit(do_not_specialize=[
    "N", "H", "entries", "near", "works", "many_qb", "many_qh", "many_kb", "many_kh", "many_bb",
    "many_bh",
])  # fmt: skip
def attention_kernel(
    q_desc, phi_q_desc, k_desc, v_desc, phi_k_desc, key_bias_desc, o_desc, marks_ptr, slopes_ptr,
    lengths_ptr, scale, to_exp2, N, H, entries, near, works,
    many_qb, many_qh, many_kb, many_kh, many_bb, many_bh,
    FORM: gl.constexpr, MATH_REGS: gl.constexpr, COPY_REGS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """softmax(scale q k^T + phi_q phi_k^T + bias) v of as many queries as keys.

    Args:
        q_desc, k_desc, v_desc, o_desc: (B, H, N, D), in tiles of 64 rows of q and o, and as many of
            k and v as the form says.
        phi_q_desc, phi_k_desc: (B or 1, H or 1, N, R), phi_q divided by the scale.
        key_bias_desc: fp32 (rows, N), a bias per key.
        marks_ptr: int32, one for each block of queries, zeros before the first pass.
        slopes_ptr: fp32 (H,), of ALiBi.
        lengths_ptr: fp32 (2, H), squares of the largest lengths of a head's queries, then keys.
        scale, to_exp2: what turns scores into exponents of two: their scale times log2(e), or
            log2(e) alone where a bias is added to scores times their scale.
        entries: heads of all batch entries.
        near: causal: heads that are worked on at the same time.
        works: number of blocks of queries.
        many_qb, many_qh, many_kb, many_kh: 1 where factors have that many batch entries, or heads,
            0 where they have one for all.
        many_bb, many_bh: rows from a batch entry's bias to the next, and from a head's.
        FORM: `Form.code()`.
    """
    dtype: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = get(FORM, "GROUPS")
    STAGES: gl.constexpr = get(FORM, "STAGES")
    if get(FORM, "AGAIN"):
        # most often none of its blocks is marked, and a program ends here
        own = gl.arange(0, MARKS, gl.BlockedLayout([1], [32], [num_warps], [0]))
        own = gl.program_id(0) + own * gl.num_programs(0)
        marks = gl.load(marks_ptr + own, mask=own < works, other=0)
        works = gl.where(gl.max(marks, 0) > 0, works, 0)
    q_buf = _slots(q_desc, GROUPS)
    k_buf, v_buf = _slots(k_desc, STAGES), _slots(v_desc, STAGES)
    pq_buf, pk_buf, bias_buf = q_buf, k_buf, k_buf
    if get(FORM, "COLUMNS") > 0:
        pq_buf, pk_buf = _slots(phi_q_desc, GROUPS), _slots(phi_k_desc, STAGES)
    if get(FORM, "BIAS") == KEY_BIAS:
        bias_buf = _slots(key_bias_desc, STAGES)
    q_bars = (_barrier(1), _barrier(GROUPS))
    bars = (
        _barriers(STAGES, 1), _barriers(STAGES, GROUPS), _barriers(STAGES, 1),
        _barriers(STAGES, GROUPS), _barriers(GROUPS, 1),
    )  # fmt: skip
    descs = (q_desc, phi_q_desc, k_desc, v_desc, phi_k_desc, key_bias_desc)
    q_bufs, bufs = (q_buf, pq_buf), (k_buf, v_buf, pk_buf, bias_buf)
    out = (o_desc, scale, to_exp2, marks_ptr, slopes_ptr)
    many = (many_qb, many_qh, many_kb, many_kh, many_bb, many_bh)
    sizes = (N, H, entries, near, works, many, (slopes_ptr, lengths_ptr, scale))
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (q_bufs, bufs, q_bars, bars, out, sizes, 0, dtype, FORM)),
                (_produce, (descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM)),
            ],
            [1], [COPY_REGS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (_consume, (q_bufs, bufs, q_bars, bars, out, sizes, 0, dtype, FORM)),
                (_consume, (q_bufs, bufs, q_bars, bars, out, sizes, 1, dtype, FORM)),
                (_produce, (descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM)),
            ],
            [num_warps, 1], [MATH_REGS, COPY_REGS],
        )  # fmt: skip

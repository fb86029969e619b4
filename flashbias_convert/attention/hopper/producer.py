"""The warp that copies, in Gluon; see `kernel` for the barriers."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .items import first_key, work_item
from .steps import advance
from .tiles import KEY_BIAS, ROWS, get


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
    first, b, h, tiles, last = work_item(work, sizes, FORM)
    mbarrier.wait(q_empty, qp ^ 1)
    _copy_queries(descs, q_bufs, q_full, first, b, h, many, FORM)
    for t in range(0, tiles):
        mbarrier.wait(k_empty.index(ks), kp ^ 1)
        _copy_keys(descs, bufs, k_full, first_key(t, last, FORM), b, h, many, ks, FORM)
        ks, kp = advance(ks, kp, STAGES)
        if OVERLAP:
            if t > 0:  # one behind the keys
                mbarrier.wait(v_empty.index(vs), vp ^ 1)
                _copy_values(descs, bufs, v_full, first_key(t - 1, last, FORM), b, h, vs, FORM)
                vs, vp = advance(vs, vp, STAGES)
        else:
            mbarrier.wait(v_empty.index(vs), vp ^ 1)
            _copy_values(descs, bufs, v_full, first_key(t, last, FORM), b, h, vs, FORM)
            vs, vp = advance(vs, vp, STAGES)
    if OVERLAP:
        mbarrier.wait(v_empty.index(vs), vp ^ 1)
        _copy_values(descs, bufs, v_full, first_key(tiles - 1, last, FORM), b, h, vs, FORM)
        vs, vp = advance(vs, vp, STAGES)
    return (ks, kp, vs, vp, qp ^ 1)


@gluon.jit
def produce(descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM: gl.constexpr):
    zero = gl.to_tensor(0)
    ring = (zero, zero, zero, zero, zero)
    if get(FORM, "AGAIN"):
        for work in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
            if gl.load(marks_ptr + work) != 0:
                ring = _produce_item(work, ring, descs, q_bufs, bufs, q_bars, bars, sizes, FORM)
    else:
        _produce_item(gl.program_id(0), ring, descs, q_bufs, bufs, q_bars, bars, sizes, FORM)

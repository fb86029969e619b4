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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import rules
from .consumer import consume
from .producer import produce
from .tiles import KEY_BIAS, get

#: most marks that a program of the second pass looks at
MARKS = gl.constexpr(rules.MARKS)


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
    "many_bh", "table_step",
])  # fmt: skip
def attention_kernel(
    q_desc, phi_q_desc, k_desc, v_desc, phi_k_desc, key_bias_desc, o_desc, marks_ptr, slopes_ptr,
    lengths_ptr, table_ptr, table_step, codes_q_ptr, codes_k_ptr, scale, to_exp2,
    N, H, entries, near, works, many_qb, many_qh, many_kb, many_kh, many_bb, many_bh,
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
        table_ptr, table_step: fp32 (H or 1, T), and entries from a head to the next, or 0.
        codes_q_ptr, codes_k_ptr: int32 (N,), see `RelativeTable`.
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
    bias_ptrs = (slopes_ptr, table_ptr, table_step, codes_q_ptr, codes_k_ptr)
    out = (o_desc, scale, to_exp2, marks_ptr, bias_ptrs)
    many = (many_qb, many_qh, many_kb, many_kh, many_bb, many_bh)
    sizes = (N, H, entries, near, works, many, (slopes_ptr, lengths_ptr, scale))
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (q_bufs, bufs, q_bars, bars, out, sizes, 0, dtype, FORM)),
                (produce, (descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM)),
            ],
            [1], [COPY_REGS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (consume, (q_bufs, bufs, q_bars, bars, out, sizes, 0, dtype, FORM)),
                (consume, (q_bufs, bufs, q_bars, bars, out, sizes, 1, dtype, FORM)),
                (produce, (descs, q_bufs, bufs, q_bars, bars, marks_ptr, sizes, FORM)),
            ],
            [num_warps, 1], [MATH_REGS, COPY_REGS],
        )  # fmt: skip

"""The Triton kernels of the backward pass that adds with atomics; see `backward_atomic`.

Scores are computed again once instead of twice: a program has one block of keys, as in
`triton_keys`, and also adds its share of the gradients of queries to what the programs of other
keys add, in fp32 and in whatever order they come. The same call gives other last bits every time.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_keys import walk_keys
from .triton_tiles import batch_entry, parts_of_scale, rows_of, store_rows, through_length


@triton.jit(do_not_specialize=["query_start"])
def all_gradients_kernel(
    c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_SUMS: tl.constexpr,
    CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr, NATURAL: tl.constexpr,
    ADDED: tl.constexpr, WHOLE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All gradients but those of pairs and of row scales."""
    walk_keys(
        c, t, out, entries, scale, query_start, region_value, G, kv_group, N, M,
        D, DV, BLOCK_D, BLOCK_DV, COLUMNS, ALIGNED, ALIGNED_SUMS,
        CAUSAL, COSINE, SYMMETRIC, NATURAL, ADDED, WHOLE, WHOLE_ROWS, BM, BN,
    )  # fmt: skip


@triton.jit
def finish_queries_kernel(
    c, heads, sums, dq, entries, scale, G, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """From sums of ds k, by head of the group, to the gradient of q in its dtype."""
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    g = (pid // blocks) % G
    b = batch_entry(entries, pid // blocks // G, 0)
    h = g
    if heads is not None:
        h = tl.load(heads + g)
    scale, _ = parts_of_scale(c, scale, h)
    rows = ((pid % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    d_q = rows_of(sums, b, g, rows, inside, D, BLOCK_D) * scale
    if COSINE:
        d_q = through_length(d_q, rows_of(c.raw_q, b, h, rows, inside, D, BLOCK_D))
    store_rows(dq, b, h, rows, inside, d_q, D, BLOCK_D, False)

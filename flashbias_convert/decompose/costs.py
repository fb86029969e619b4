"""What a term costs per score: a fixed rule that stands in until measured costs exist.

All numbers of the choice live here, and nowhere else.
"""

from __future__ import annotations

#: Shorter sites gain little: method "auto" leaves them alone. Measured on an H200 with a module of
#: SwinV2 (scripts/results/bench_windows.csv): 1.2 times faster with 4 tokens, 3.3 times with 16.
SHORTEST_N = 16

#: Ranks are padded to a power of two, at least this one, the shortest product a tensor core does.
SMALLEST_BUCKET = 16

# Estimates, from single runs on an H200 in bf16 with windows of 576 tokens and 16 heads of 32. The
# unit is what 16 factor columns add there, 0.02 ms to about 0.22 ms; a dense bias adds 0.11 ms, a
# table 0.20 ms. That 64 columns cost six units is a comparison across runs (windows of 144 tokens);
# 128 columns and more, and dense biases that leave the cache, were not measured.

#: Cost of a low-rank term by its padded number of columns.
LOW_RANK = {16: 1.0, 32: 2.0, 64: 6.0, 128: 16.0, 256: 40.0}
#: Cost of a diagonal: a comparison, a selection and an addition per score, and no memory. Nobody
#: measured it; it counts as much as 16 columns, so that a diagonal must save more than these.
DIAGONAL = 1.0
#: More columns than any kernel takes.
LOW_RANK_BEYOND = 100.0
#: Cost of one table look-up.
RELATIVE_TABLE = 9.0
#: Cost of a dense bias that stays in the cache, and of one that does not.
DENSE_CACHED, DENSE_STREAMED = 5.0, 15.0
#: Largest dense bias of one head, in bytes of half precision, that stays in the cache: N = 1024.
CACHED_BYTES = 2 * 1024 * 1024


def rank_bucket(rank: int) -> int:
    """The padded rank that a kernel works with: 16, 32, 64, 128, ...; 0 for rank 0."""
    if rank == 0:
        return 0
    return max(SMALLEST_BUCKET, 1 << (rank - 1).bit_length())


def relative_cost(kind: str, n: int, m: int, rank: int = 0) -> float:
    """Cost per score of adding a term to an attention over n queries and m keys.

    The rule, verbatim: nothing costs 0; a low-rank term 1, 2, 6, 16 or 40 if its rank, padded,
    is 16, 32, 64, 128 or 256, and 100 above; a diagonal 1; a relative table 9; a dense bias 5 while
    the n x m matrix of one head takes at most 2 MiB in half precision (n = m = 1024), else 15. Of
    two terms of equal cost the exact one is taken, and of factors those without a diagonal.

    Args:
        kind: "none", or the kind of a term.
        n: number of queries.
        m: number of keys.
        rank: of a low-rank term.

    Raises:
        ValueError: a kind without a cost.
    """
    if kind == "none":
        return 0.0
    if kind == "low_rank":
        bucket = rank_bucket(rank)
        return LOW_RANK.get(bucket, LOW_RANK_BEYOND) if bucket else 0.0
    if kind == "diagonal":
        return DIAGONAL
    if kind == "relative_table":
        return RELATIVE_TABLE
    if kind == "dense":
        return DENSE_CACHED if 2 * n * m <= CACHED_BYTES else DENSE_STREAMED
    raise ValueError(f"no cost is known for a term of kind {kind!r}")

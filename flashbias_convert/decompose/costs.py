"""What attention with a term costs per score, from measurements in `cost_table.csv`.

`scripts/measure_costs.py` makes the table: forward calls in bf16 with about as many scores at every
length. All numbers of the choice of terms live there and here, and nowhere else; `factor_times` has
those of how long factors take to make. A dense bias costs what it costs where batch entries
do not share its tiles, as beside a mask or a gate and in cosine attention; `shared_dense_cost` has
what it costs where they do.
"""

from __future__ import annotations

import bisect
import math
from functools import cache
from importlib.resources import files

from ..cost_tables import Curve, read_costs

#: Shorter sites gain little: method "auto" leaves them alone. Measured on an H200 with a module of
#: SwinV2 in bf16 (scripts/results/bench_windows.csv): 3.31 ms with 4 tokens a window where the
#: original takes 3.93, and 1.10 with 16 where it takes 3.66. None of them is compiled; nothing was
#: measured between 4 and 16 tokens.
SHORTEST_N = 16
#: What that was, as users are told.
SHORT_GAIN = "1.18 times at 4 tokens, 3.3 at 16, beside an original that is not compiled"

#: Ranks are padded to a power of two, at least this one, the shortest product a tensor core does.
SMALLEST_BUCKET = 16
#: All of them that were measured; kernels take no more columns than the last.
BUCKETS = (16, 32, 64, 128, 256)
#: Of a site that does not say its own.
USUAL_HEAD_DIM = 64

#: What the table calls attention without a bias, and with a dense one in torch's fused attention.
PLAIN, DENSE_SDPA = "none", "dense, sdpa"
#: Two terms in one form: what it costs more than the first alone is the cost of the second.
TOGETHER = {"diagonal": ("low_rank 16 + diagonal", "low_rank 16")}
#: Forms that were measured, by kinds of terms; a key bias adds a number per key, as ALiBi does.
FORMS = {
    "relative_table": "relative_table",
    "dense": "dense",
    "alibi": "alibi",
    "key_bias": "alibi",
    "regions": "regions",
}

#: A table whose entries of two keys come by one read, see `RelativeTable.pairs`.
PAIRS = "relative_table, pairs"

#: A dense bias of all heads whose tiles batch entries share; only where `tuning` lets them.
SHARED_DENSE = "dense, shared"

#: Not measured yet, and the terms that each is reckoned from: the dearer of them counts. A lookup
#: reads an integer for each pair, where a dense bias reads a number, and then an entry of a table.
RECKONED = {"lookup": ("dense", "relative_table")}

#: The class of cards whose measurements count; the table may have others.
CARDS = "hopper"


def rank_bucket(rank: int) -> int:
    """The padded rank that a kernel works with: 16, 32, 64, 128, ...; 0 for rank 0."""
    if rank == 0:
        return 0
    return max(SMALLEST_BUCKET, 1 << (rank - 1).bit_length())


def time_per_score(form: str, n: int, m: int, head_dim: int | None = None) -> float:
    """Picoseconds per score of attention over n queries and m keys, as measured on Hopper.

    Between measured lengths it is interpolated over the logarithm of sqrt(n m), beyond them it is
    that of the nearest; head sizes count as the next measured one.

    Args:
        form: as the table calls it.
        n: number of queries.
        m: number of keys.
        head_dim: size of a head; None if it is not known.

    Raises:
        ValueError: a form that was not measured.
    """
    curves = _curves(head_dim)
    if form not in curves:
        raise ValueError(f"no cost is known for {form!r}")
    return _interpolated(curves[form], math.sqrt(max(1, n * m)))


def is_measured(kind: str, head_dim: int | None = None) -> bool:
    """Whether the cost of a kind of term comes from a measurement of its own."""
    return kind not in RECKONED or kind in _curves(head_dim)


def added_cost(
    kind: str, n: int, m: int, rank: int = 0, head_dim: int | None = None, paired: bool = False
) -> float:
    """Picoseconds per score that a term adds to attention over n queries and m keys.

    Of two terms of equal cost the exact one is taken, and of factors those without a diagonal.

    Args:
        kind: "none", or the kind of a term.
        n: number of queries.
        m: number of keys.
        rank: of a low-rank term.
        head_dim: size of a head; None if it is not known.
        paired: of a table, whether it is `RelativeTable.pairs`.

    Returns:
        At least 0, for noise makes nothing faster; infinity for more columns than were measured.

    Raises:
        ValueError: a kind without a cost.
    """
    if kind == "none" or (kind == "low_rank" and rank == 0):
        return 0.0
    if kind == "low_rank":
        return _columns(rank_bucket(rank), n, m, head_dim)
    if kind in TOGETHER:
        both, one = (time_per_score(form, n, m, head_dim) for form in TOGETHER[kind])
        return max(0.0, both - one)
    if kind in RECKONED:
        if is_measured(kind, head_dim):
            return _added(kind, n, m, head_dim)
        return max(added_cost(other, n, m, head_dim=head_dim) for other in RECKONED[kind])
    if kind not in FORMS:
        raise ValueError(f"no cost is known for a term of kind {kind!r}")
    form = PAIRS if kind == "relative_table" and paired else FORMS[kind]
    return _added(form, n, m, head_dim)


def shared_dense_cost(n: int, m: int, head_dim: int | None = None) -> float:
    """Picoseconds per score of a dense bias that all heads have and that batch entries share.

    Args:
        n, m, head_dim: see `added_cost`.

    Returns:
        Infinity where that was not measured, as at head sizes whose entries share nothing.
    """
    if SHARED_DENSE not in _curves(head_dim):
        return math.inf
    return _added(SHARED_DENSE, n, m, head_dim)


def affordable_rank(n: int, m: int, head_dim: int | None = None) -> int:
    """The largest rank whose factors cost less than a dense bias over n queries and m keys.

    Ranks go as far as the smaller of the two, padded. 0 means that no factors cost less.

    Args:
        n: number of queries.
        m: number of keys.
        head_dim: size of a head; None if it is not known.
    """
    dense = added_cost("dense", n, m, head_dim=head_dim)
    most = rank_bucket(max(min(n, m), SMALLEST_BUCKET))
    ranks = (rank for rank in BUCKETS if rank <= most)
    return max((r for r in ranks if added_cost("low_rank", n, m, r, head_dim) < dense), default=0)


def _columns(bucket: int, n: int, m: int, head_dim: int | None) -> float:
    """Never less than fewer columns cost, whatever a measurement says."""
    if bucket > BUCKETS[-1]:
        return math.inf
    return max(_added(f"low_rank {b}", n, m, head_dim) for b in BUCKETS if b <= bucket)


def _added(form: str, n: int, m: int, head_dim: int | None) -> float:
    plain = time_per_score(PLAIN, n, m, head_dim)
    return max(0.0, time_per_score(form, n, m, head_dim) - plain)


def _interpolated(curve: Curve, length: float) -> float:
    at = bisect.bisect_left([n for n, _ in curve], length)
    if at == 0 or at == len(curve):
        return curve[min(at, len(curve) - 1)][1]
    (n0, low), (n1, high) = curve[at - 1], curve[at]
    share = math.log(length / n0) / math.log(n1 / n0)
    return low + share * (high - low)


def _curves(head_dim: int | None) -> dict[str, Curve]:
    """Those of the next measured head size."""
    table = _table()
    sizes = sorted(table)
    return table[sizes[min(bisect.bisect_left(sizes, head_dim or USUAL_HEAD_DIM), len(sizes) - 1)]]


@cache
def _table() -> dict[int, dict[str, Curve]]:
    """Head size -> form -> curve."""
    return read_costs((files(__package__) / "cost_table.csv").read_text("utf-8"), CARDS)

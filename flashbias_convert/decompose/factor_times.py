"""How long factors take to make, from measurements in `factor_times.csv`.

`scripts/measure_factor_times.py` makes the table, of `decompose_quickly` on a card: all that it
does to a bias at hand, for all heads together. Each row says what was measured, and where.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from importlib.resources import files

from .interpolation import between

#: columns of the table
FIELDS = ("heads", "n", "rank", "ms", "what", "class", "card", "torch", "source")
#: heads -> length -> (rank, milliseconds), ascending
Times = dict[int, dict[int, list[tuple[int, float]]]]


def is_measured(card_class: str | None) -> bool:
    """Whether the table has times of such cards."""
    return bool(_table(card_class))


def factors_ms(matrices: int, n: int, m: int, rank: int, card_class: str | None) -> float:
    """Milliseconds to make the factors of a bias, all heads together.

    Between measured ranks, lengths and numbers of heads it is interpolated, linearly. Below the
    least measured one it is that one's time, which is too much rather than too little; beyond the
    last it grows in proportion, and with the square of the length.

    Args:
        matrices: entries of the batch of the bias, times heads.
        n: number of queries.
        m: number of keys.
        rank: columns that are looked for.
        card_class: see `cost_tables.CLASSES`.

    Returns:
        Infinity for cards of which nothing was measured: nobody knows whether factors pay there.
    """
    table = _table(card_class)
    if not table:
        return math.inf
    length = math.sqrt(n * m)
    by_heads = []
    for heads, lengths in table.items():
        by_length = [(own, between(curve, rank)) for own, curve in lengths.items()]
        by_heads.append((heads, between(by_length, length, power=2)))
    return between(by_heads, matrices)


def read_times(text: str, card_class: str) -> Times:
    """The rows of one class of cards.

    Args:
        text: CSV with (at least) the columns "heads", "n", "rank", "ms" and "class".
        card_class: see `cost_tables.CLASSES`.

    Raises:
        KeyError, ValueError: no such table.
    """
    found: Times = {}
    rows = [row for row in csv.DictReader(text.splitlines()) if row["class"] == card_class]
    for heads, n, rank, ms in sorted(
        (int(r["heads"]), int(r["n"]), int(r["rank"]), float(r["ms"])) for r in rows
    ):
        found.setdefault(heads, {}).setdefault(n, []).append((rank, ms))
    return found


@cache
def _table(card_class: str | None) -> Times:
    if card_class is None:
        return {}
    return read_times((files(__package__) / "factor_times.csv").read_text("utf-8"), card_class)

"""How long a bias of pairs takes to make, or factors of it by networks, from measurements.

`scripts/measure_pair_times.py` makes the table, `pair_times.csv`: what a call of attention takes
more on the card than the same call with terms that are there already. Each row says what was
measured, and where. Those of the norm are differences of what the script measured while torch's
layers projected pairs.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from . import costs
from .interpolation import between

#: columns of the table
FIELDS = ("what", "channels", "heads", "rank", "n", "ms", "class", "card", "torch", "triton")
#: what makes a row the same row
KEY = ("what", "channels", "heads", "rank", "n", "class")
#: what a call does for a dense bias that it need not do where networks serve
Saved = Literal["laying out", "linear", "norm and linear"]
NETWORKS, NORM = "networks", "norm"
#: of a curve: (what, channels, heads, rank); a dense bias has rank 0, one that is only laid out is
#: made from 0 channels, and a norm has no heads
Place = tuple[str, int, int, int]


@dataclass(frozen=True)
class Pairs:
    """What the bias of a site is made from in each call.

    Attributes:
        channels: C of the pair representation, (N, N, C), that networks read.
        saves: what is left out where networks serve: the linear layer that projects the pairs,
            the norm before it, too, if the kernel that projects does that as well, or, where the
            site gets its bias ready, only to lay it out.
        normed: networks read the pairs behind a norm that nothing else needs.
        rows: how many rows of tokens attend with one bias; None says as many as there are tokens,
            as in triangle attention.
    """

    channels: int
    saves: Saved
    rows: int | None = 1
    normed: bool = False

    def rows_of(self, n: int) -> int:
        """Rows that attend with one bias of n tokens."""
        return n if self.rows is None else self.rows


def dense_ms(pairs: Pairs, heads: int, n: int) -> float:
    """Milliseconds to make the bias of n tokens, and to lay it out.

    Between measured lengths, numbers of channels and heads it is interpolated, linearly. Below the
    least measured it is the time there; beyond the last it goes on as between the last two, and
    with the square of the length.

    Args:
        pairs: what it is made from.
        heads: H.
        n: number of tokens.
    """
    channels = 0 if pairs.saves == "laying out" else pairs.channels
    return _looked_up(pairs.saves, channels, heads, 0, n)


def networks_ms(pairs: Pairs, heads: int, rank: int, n: int) -> float:
    """Milliseconds that factor networks take for n tokens, their features included.

    With a padding mask, without which their features take less time.

    Args:
        pairs, heads, n: see `dense_ms`.
        rank: of every head.
    """
    norm = _looked_up(NORM, pairs.channels, 0, 0, n) if pairs.normed else 0.0
    return norm + _looked_up(NETWORKS, pairs.channels, heads, rank, n)


def _looked_up(what: str, channels: int, heads: int, rank: int, n: int) -> float:
    """See `dense_ms`; one dimension after the other."""
    curves = {place[1:]: curve for place, curve in _table().items() if place[0] == what}
    by_length: dict[tuple[int, ...], float]
    by_length = {place: between(curve, n, power=2) for place, curve in curves.items()}
    by_heads = _without_last(by_length, rank)
    by_channels = _without_last(by_heads, heads)
    return _without_last(by_channels, channels)[()]


def _without_last(values: Mapping[tuple[int, ...], float], at: int) -> dict[tuple[int, ...], float]:
    """Values between those of the last dimension."""
    points: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for place, value in sorted(values.items()):
        points.setdefault(place[:-1], []).append((place[-1], value))
    return {place: between(own, at, power=None) for place, own in points.items()}


def read_times(text: str, card_class: str) -> dict[Place, Sequence[tuple[int, float]]]:
    """The curves of one class of cards: length and milliseconds, ascending.

    Args:
        text: CSV with (at least) the columns "what", "channels", "heads", "rank", "n", "ms" and
            "class".
        card_class: see `cost_tables.CLASSES`.

    Raises:
        KeyError, ValueError: no such table, or no row of that class.
    """
    found: dict[Place, list[tuple[int, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["class"] != card_class:
            continue
        place = (row["what"], int(row["channels"]), int(row["heads"]), int(row["rank"]))
        ms = float(row["ms"])
        if not math.isfinite(ms):
            raise ValueError(f"{ms} is no time: {row}")
        found.setdefault(place, []).append((int(row["n"]), ms))
    if not found:
        raise ValueError(f"nothing was measured on cards of class {card_class!r}")
    return {place: sorted(curve) for place, curve in found.items()}


@cache
def _table() -> dict[Place, Sequence[tuple[int, float]]]:
    return read_times((files(__package__) / "pair_times.csv").read_text("utf-8"), costs.CARDS)

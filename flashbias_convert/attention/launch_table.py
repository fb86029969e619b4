"""Launch settings of the forward kernel by classes of shapes, in `launch_table.csv`.

A shape has the settings of the first class of the table that it is of; the last classes take
everything. `scripts/make_launch_table.py` makes the table of what `scripts/tune_attention.py`
measures on a card; its column "why" is for readers. Classes of which nothing was measured have
settings with which kernels compile without spilling registers. Cards with less memory on the chip
get smaller ones, see `room`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from .tuning import LaunchSettings, LaunchShape, few_rows

TABLE = files(__package__) / "launch_table.csv"
#: tensors of a table, or of a look-up, alone
_OF_LOOK_UPS = frozenset({"table", "codes_q", "codes_k", "lookup", "lookup_code"})
#: blocks of 128 queries fill a sequence as well as blocks of 64 do, but for a twentieth
_TALL = 1.05


@dataclass(frozen=True)
class Span:
    """Integers from `first` to `last`; without a last one if that is None."""

    first: int
    last: int | None

    @classmethod
    def of(cls, text: str) -> Span:
        """As the table writes it: `17-512`, or `17-`."""
        first, _, last = text.partition("-")
        return cls(int(first), int(last) if last else None)

    def __contains__(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)


@dataclass(frozen=True)
class ShapeClass:
    """Shapes that are launched alike.

    Attributes:
        name: of the class.
        precision: "half", or "fp32", whose products run on the plain arithmetic units.
        widths: the larger of both head sizes, padded.
        columns: padded columns of factors.
        queries: number of queries.
        fill: how blocks of 128 queries may fill the sequence: "few" rows of the last one, "even",
            or "tall", where they waste nearly nothing; empty for all.
        terms: words that must be true of the terms, see `words_of`.
    """

    name: str
    precision: str
    widths: Span
    columns: Span
    queries: Span
    fill: frozenset[str]
    terms: frozenset[str]

    def holds(self, shape: LaunchShape) -> bool:
        """Whether a shape is of this class."""
        return (
            self.precision == ("half" if shape.half else "fp32")
            and max(shape.d, shape.dv) in self.widths
            and shape.columns in self.columns
            and shape.n in self.queries
            and (not self.fill or fill_of(shape.n) in self.fill)
            and self.terms <= words_of(shape)
        )


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        of: the class.
        settings: of its launches.
        measured: shapes that were measured, by their names in `scripts/attention_shapes.py`.
        card: on which.
    """

    of: ShapeClass
    settings: LaunchSettings
    measured: tuple[str, ...]
    card: str


def fill_of(n: int) -> str:
    """How blocks of 128 queries fill a sequence of n, see `ShapeClass`."""
    if few_rows(n):
        return "few"
    return "tall" if -(-n // 128) * 128 <= _TALL * (-(-n // 64) * 64) else "even"


def words_of(shape: LaunchShape) -> frozenset[str]:
    """What the terms of a shape are called in the table.

    Besides names of tensors: "shared" where entries of the batch share tiles of a dense bias,
    "gathers" where scores look something up, "alone" where nothing is added to them but that.
    """
    words = set(shape.terms)
    if shape.shared:
        words.add("shared")
    if words & {"table", "lookup"}:
        words.add("gathers")
    if _OF_LOOK_UPS.issuperset(shape.terms):
        words.add("alone")
    return frozenset(words)


def parse_table(text: str) -> tuple[Entry, ...]:
    """The rows of a table of this text, in order."""
    return tuple(_entry(row) for row in csv.DictReader(io.StringIO(text)))


def _entry(row: Mapping[str, str]) -> Entry:
    numbers = {f.name: row[f.name] for f in fields(LaunchSettings)}
    given: dict[str, Any] = {name: int(text) if text else None for name, text in numbers.items()}
    own = ShapeClass(
        row["name"],
        row["precision"],
        Span.of(row["widths"]),
        Span.of(row["columns"]),
        Span.of(row["queries"]),
        frozenset(row["fill"].split()),
        frozenset(row["terms"].split()),
    )
    measured = tuple(filter(None, row["measured"].split("; ")))
    return Entry(own, LaunchSettings(**given), measured, row["card"])


@cache
def launch_table() -> tuple[Entry, ...]:
    """The committed table."""
    return parse_table(TABLE.read_text("utf-8"))


def entry_of(shape: LaunchShape, table: Sequence[Entry] | None = None) -> Entry:
    """The row that a shape is launched by: the first whose class it is of.

    Raises:
        LookupError: the table has none.
    """
    for entry in launch_table() if table is None else table:
        if entry.of.holds(shape):
            return entry
    raise LookupError(f"no launch settings for {shape}")


@lru_cache(maxsize=4096)
def launch_settings(shape: LaunchShape) -> LaunchSettings:
    """Settings for one launch, the same for a shape in every process."""
    return entry_of(shape).settings

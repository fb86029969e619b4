"""Rows of a table in a CSV file, written one by one, and kept by a run that goes on with them."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: columns of what a number may change with though it measures the same
VERSIONS = ("card", "torch", "triton")
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            {k: v or "" for k, v in row.items() if k is not None} for row in csv.DictReader(file)
        ]


def write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """The whole file; whoever is killed meanwhile leaves the one that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def begin(path: Path, columns: Sequence[str], *, resume: bool) -> list[Row]:
    """Begin a file anew, or go on with the one that is there; returns the rows that it has.

    Raises:
        SystemExit: it has columns of another table.
    """
    rows = _checked(path, columns) if resume and path.is_file() else []
    write(path, columns, rows)  # with these columns, and without a last line that was cut
    return rows


def append(path: Path, columns: Sequence[str], row: Mapping[str, Any]) -> None:
    """Add a row to a file that is begun."""
    with path.open("a", newline="") as file:
        csv.DictWriter(file, columns, restval="", lineterminator="\n").writerow(row)


def key_of(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Some columns, as a file has them."""
    return tuple(_text(row.get(name)) for name in names)


def _checked(path: Path, columns: Sequence[str]) -> list[Row]:
    rows = read(path)
    if rows and not path.read_bytes().endswith(b"\n"):
        rows.pop()  # whoever wrote it was ended meanwhile
    if other := [name for name in (rows[0] if rows else ()) if name not in columns]:
        raise SystemExit(f"{path} has columns of another table ({other[0]}): name another file")
    return rows


def _text(value: Any) -> str:
    return "" if value is None else str(value)


class RowFile:
    """A CSV file that one process adds rows to. It is touched when the first row is added.

    A row is known if one of the same key and of the same versions is there. One of other versions
    stays until it has been measured again; a file without one of these columns is measured anew.

    Args:
        path: of the file.
        columns: of its rows.
        key: columns that say what is measured.
        versions: columns that must be the same, too, for a row to be known.
        resume: keep the rows that are there.
        others: without `resume`, too, keep those of which this is true.

    Attributes:
        rows: all rows, those that were there before included.

    Raises:
        SystemExit: rows are to be kept, and the file has columns of another table.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        *,
        key: Sequence[str],
        versions: Sequence[str] = VERSIONS,
        resume: bool = False,
        others: Callable[[Row], bool] | None = None,
    ) -> None:
        self.path, self.columns = path, tuple(columns)
        self._key, self._versions = tuple(key), tuple(versions)
        keeps = (lambda _: True) if resume else others
        found = _checked(path, columns) if keeps else []
        self.rows = [r for r in found if keeps is not None and keeps(r)]
        lacks = [n for n in (*key, *versions) if self.rows and n not in self.rows[0]]
        if lacks:
            print(f"{path.name}: its rows do not say their {lacks[0]}, and are measured again")
            self.rows = []
        self._by_key: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            self._by_key.setdefault(key_of(row, self._key), []).append(row)
        self._begun = False
        self._told: set[tuple[str, ...]] = set()

    def find(self, row: Mapping[str, Any]) -> Row | None:
        """The row that is there already; says so if there is one of other versions alone."""
        wanted = key_of(row, self._versions)
        for known in self._by_key.get(key_of(row, self._key), ()):
            found = key_of(known, self._versions)
            if found == wanted:
                return known
            if found not in self._told:
                self._told.add(found)
                print(f"{self.path.name}: rows of {', '.join(found)} are measured again")
        return None

    def add(self, row: Mapping[str, Any]) -> Row:
        """Write a row at once, in the place of one with the same key; returns it as text."""
        text = {name: _text(row.get(name)) for name in self.columns}
        key = key_of(text, self._key)
        replaced = self._by_key.get(key, [])
        if replaced:
            self.rows = [r for r in self.rows if key_of(r, self._key) != key]
        self.rows.append(text)
        self._by_key[key] = [text]
        if self._begun and not replaced:
            append(self.path, self.columns, text)
        else:
            write(self.path, self.columns, self.rows)
        self._begun = True
        return text

    def of(self, place: Mapping[str, Any]) -> list[Row]:
        """The rows that have these values, such as those of one card and its versions."""
        return [r for r in self.rows if key_of(r, tuple(place)) == key_of(place, tuple(place))]

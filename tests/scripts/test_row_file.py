"""Rows that a run which goes on keeps, and those that it measures again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import row_file
from row_file import RowFile

COLUMNS = ("n", "way", "ms", "card", "torch")
HERE = {"card": "A", "torch": "2"}


def table(path: Path, **changes: Any) -> RowFile:
    own = {"key": ("n", "way", "card"), "versions": ("torch",), "resume": True, **changes}
    return RowFile(path, COLUMNS, **own)


def row(n: int, ms: float | None = None, **changes: str) -> dict[str, Any]:
    return {"n": n, "way": "ours, x", "ms": ms, **HERE, **changes}


def times(path: Path) -> list[tuple[str, str, str, str]]:
    return [(r["n"], r["ms"], r["card"], r["torch"]) for r in row_file.read(path)]


def test_rows_are_there_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    first = table(path)
    assert first.find(row(1)) is None and not path.exists()
    first.add(row(1, 0.5))
    assert times(path) == [("1", "0.5", "A", "2")]
    first.add(row(2))
    assert times(path)[1] == ("2", "", "A", "2")
    later = table(path)
    known = later.find(row(1))
    assert known is not None and known["ms"] == "0.5"
    assert later.find(row(2)) is not None and later.find(row(3)) is None
    later.add(row(3, 0.25))
    assert times(path) == [
        (n, ms, "A", "2") for n, ms in zip("123", ("0.5", "", "0.25"), strict=True)
    ]
    assert [p.name for p in path.parent.iterdir()] == ["table.csv"]


def test_rows_of_other_versions_stay_until_they_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    old = [row(n, 1.0, torch="1") for n in (1, 2)] + [row(1, 3.0, card="B", torch="1")]
    row_file.write(path, COLUMNS, old)
    found = table(path)
    assert found.find(row(1)) is None and found.find(row(2)) is None
    assert capsys.readouterr().out == "table.csv: rows of 1 are measured again\n"
    assert found.find(row(1, card="B", torch="1")) is not None
    found.add(row(1, 0.5))
    assert times(path) == [("2", "1.0", "A", "1"), ("1", "3.0", "B", "1"), ("1", "0.5", "A", "2")]
    assert [r["n"] for r in found.of(HERE)] == ["1"]
    assert found.find(row(1)) is not None


def test_without_resume_a_table_is_new(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    row_file.write(path, COLUMNS, [row(1, 1.0), row(2, 1.0, card="B")])
    new = table(path, resume=False)
    assert new.find(row(1)) is None and len(times(path)) == 2  # nothing is lost before it must be
    new.add(row(3, 0.5))
    assert [n for n, *_ in times(path)] == ["3"]
    row_file.write(path, COLUMNS, [row(1, 1.0), row(2, 1.0, card="B")])
    kept = table(path, resume=False, others=lambda r: r["card"] == "B")
    kept.add(row(3, 0.5))
    assert [n for n, *_ in times(path)] == ["2", "3"]


def test_a_file_that_does_not_say_enough_is_measured_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    row_file.write(path, COLUMNS[:-1], [{k: v for k, v in row(1, 1.0).items() if k != "torch"}])
    found = table(path)
    assert found.rows == [] and found.find(row(1)) is None
    assert "do not say their torch, and are measured again" in capsys.readouterr().out


def test_a_file_of_another_table_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    row_file.write(path, ("n", "colour"), [{"n": 1, "colour": "red"}])
    for begin in (table, lambda p: row_file.begin(p, COLUMNS, resume=True)):
        with pytest.raises(SystemExit, match="colour"):
            begin(path)
    assert "red" in path.read_text()


def test_rows_of_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    assert row_file.begin(path, COLUMNS, resume=True) == []
    row_file.append(path, COLUMNS, row(1, 0.5))
    assert [r["n"] for r in row_file.begin(path, COLUMNS, resume=True)] == ["1"]
    assert row_file.begin(path, COLUMNS, resume=False) == row_file.read(path) == []


def test_a_file_with_fewer_columns_or_a_cut_line_goes_on_in_order(tmp_path: Path) -> None:
    path, columns = tmp_path / "rows.csv", ("shape", "ms", "state", "card")
    path.write_text("shape,ms,card\nA,1.0,H2\nB,2.0,H")
    rows = row_file.begin(path, columns, resume=True)
    assert [row["shape"] for row in rows] == ["A"]
    row_file.append(path, columns, {"shape": "B", "ms": "3.0", "state": "ok", "card": "H2"})
    a, b = row_file.read(path)
    assert a == {"shape": "A", "ms": "1.0", "state": "", "card": "H2"}
    assert b == {"shape": "B", "ms": "3.0", "state": "ok", "card": "H2"}

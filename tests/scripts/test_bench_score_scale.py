"""Where a factor on the scores stops paying, read off a table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_score_scale as script


def row(way: str, rank: int, ms: float, status: str = "ok") -> dict[str, Any]:
    return {"way": way, "rank": rank, "d": 64, "forward_ms": ms, "both_ms": ms, "status": status}


def test_it_pays_up_to_the_first_rank_at_which_another_way_is_faster() -> None:
    times = {1: (1, 3), 2: (2, 3), 4: (4, 3), 5: (2, 3)}
    rows = [
        row(w, r, t) for r, ts in times.items() for w, t in zip((script.OURS, "x"), ts, strict=True)
    ]
    assert script.pays(rows, 64, "forward_ms") == 2
    wrong = [*rows, row("y", 1, 0.1, "wrong"), row("y", 2, 1.5)]
    assert script.pays(wrong, 64, "forward_ms") == 1
    failed = [r for r in rows if r["rank"] != 2] + [row(script.OURS, 2, 1, "out of memory")]
    assert script.pays(failed, 64, "both_ms") == 1
    assert script.pays([row(script.OURS, 1, 2), row("x", 1, 1)], 64, "both_ms") == 0


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "table.csv"
    sizes = "--sizes 8 --ranks 1 2 --tokens 16 --heads 2 --repeats 3 --no-flex --backend sdpa"
    words = [*sizes.split(), "--dtype", "float32", "--device", "cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    script.main()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["way"], r["rank"]) for r in rows] == [
        (w, r) for r in "12" for w in (script.OURS, "formula")
    ]
    assert all(r["status"] == "ok" and float(r["error"]) < 1e-5 for r in rows)
    assert "| 8 |" in output.with_suffix(".md").read_text()

"""Where a factor on the scores stops paying, read off a table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_score_scale as script
from turns import BESIDE


def row(way: str, rank: int, ms: float, status: str = "ok") -> dict[str, Any]:
    return {"way": way, "rank": rank, "d": 64, "forward_ms": ms, "both_ms": ms, "status": status}


def test_it_pays_up_to_the_first_rank_at_which_another_way_is_faster() -> None:
    def pays(rows: list[dict[str, Any]], other: str = "x") -> int:
        return script.pays(rows, 64, "forward_ms", other)

    times = {1: (1, 3), 2: (2, 3), 4: (4, 3), 5: (2, 3)}
    rows = [
        row(w, r, t) for r, ts in times.items() for w, t in zip((script.OURS, "x"), ts, strict=True)
    ]
    assert pays(rows) == 2
    others = [*rows, row("y", 1, 0.1, "wrong"), row("y", 2, 1.5)]
    assert pays(others) == 2 and pays(others, "y") == 1
    failed = [r for r in rows if r["rank"] != 2] + [row(script.OURS, 2, 1, "out of memory")]
    assert pays(failed) == 1
    assert pays([row(script.OURS, 1, 2), row("x", 1, 1)]) == 0


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


def test_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, asked = tmp_path / "table.csv", []

    def timed(*_: Any) -> dict[str, Any]:
        asked.append(1)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"forward_ms": "1.0", "both_ms": "1.0", "status": "ok"}

    monkeypatch.setattr(script, "timed", timed)
    monkeypatch.delenv(BESIDE, raising=False)
    sizes = "--sizes 8 --ranks 2 1 --tokens 16 --heads 2 --no-flex --dtype float32 --device cpu"
    words = ["script", *sizes.split(), "--output", str(output)]
    # nobody is beside: to lack memory is a result
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    assert [r["status"] for r in _rows(output)] == ["ok", "out of memory", "ok", "ok"]
    monkeypatch.setattr(sys, "argv", [*words, "--resume"])
    script.main()
    assert len(asked) == 4
    # beside others it is none
    asked.clear()
    output.unlink()
    monkeypatch.setattr(script, "lacked_beside_others", lambda _: True)
    script.main()
    assert [(r["way"], r["rank"]) for r in _rows(output)] == [
        (script.OURS, "2"), (script.OURS, "1"), (script.FORMULA, "1"),
    ]  # fmt: skip
    script.main()
    assert len(asked) == 5 and (_rows(output)[-1]["way"], len(_rows(output))) == ("formula", 4)
    assert "measured: 1, 2." in output.with_suffix(".md").read_text()


def _rows(output: Path) -> list[dict[str, str]]:
    with output.open() as file:
        return list(csv.DictReader(file))


def test_a_card_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(script, "timed", timed)
    sizes = "--sizes 8 --ranks 2 1 --tokens 16 --heads 2 --no-flex --dtype float32 --device cpu"
    output = tmp_path / "table.csv"
    monkeypatch.setattr(sys, "argv", ["script", *sizes.split(), "--output", str(output)])
    with pytest.raises(SystemExit):
        script.main()
    assert len(_rows(output)) == 1

"""The script of the Pairformer block: its ways agree, and a run of the smallest size."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import pairformer as script  # noqa: E402
import pairformer_block as parts  # noqa: E402
import pairformer_table as table  # noqa: E402

N = 18


def test_ways_agree() -> None:
    """In float64, factors of full rank included; N is no multiple of what masks are padded to."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(N, 2, N, 4, generator=draw).double() for _ in range(3))
    bias = torch.randn(2, N, N, generator=draw).double()
    expected = (q @ k.mT / 2 + bias).softmax(-1) @ v
    ways = parts.exact_ways(compiles=False)
    ways.pop("cuEquivariance", None)
    for way in (*ways.values(), parts.factors(N), parts.kept(bias, N)):
        # factors are fp32
        torch.testing.assert_close(way(q, k, v, bias), expected, atol=1e-5, rtol=1e-5)


def test_the_ending_node_is_the_starting_one_of_the_transpose() -> None:
    starting = parts.TriangleAttention(8, 2, 4, starting=True)
    ending = parts.TriangleAttention(8, 2, 4, starting=False)
    ending.load_state_dict(starting.state_dict())
    z = torch.randn(N, N, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = starting(z.transpose(0, 1), parts.sdpa).transpose(0, 1)
        torch.testing.assert_close(ending(z, parts.sdpa), expected)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, str]]:
    options = ["--tiny", "--no-compile", "--device", "cpu", "--dtype", "float32", *more]
    monkeypatch.setattr(sys, "argv", ["script", *options, "--output", str(folder)])
    script.main()
    with (folder / "pairformer.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = run(tmp_path, monkeypatch, "--parts", "diffusion")
    assert {row["component"] for row in rows} == {"diffusion step"}
    assert "200 steps: factors are" in capsys.readouterr().out
    for row in rows:
        total = float(row["once_ms"]) + 200 * float(row["ms"])
        assert float(row["steps_200_ms"]) == pytest.approx(total, abs=0.02)
    before, rows = rows, run(tmp_path, monkeypatch, "--resume")
    assert rows[: len(before)] == before  # not measured again
    assert len(rows) == len({tuple(row[name] for name in table.KEY) for row in rows})
    assert {row["status"] for row in rows if row["way"] != "cuEquivariance"} == {"ok"}
    assert (tmp_path / "pairformer.png").stat().st_size > 0
    assert {row["mode"] for row in rows} == {"inference", "training"}
    for row in rows:
        if row["error"] and not row["rank"] and row["way"] != "cuEquivariance":
            assert float(row["error"]) < 1e-5
    kept = [row for row in rows if row["way"] == "ours, factors kept"]
    assert kept and all(float(row["once_ms"]) > 0 and float(row["error"]) > 1e-5 for row in kept)


def make_table(path: Path, **options: Any) -> table.Table:
    return table.Table(path / "t.csv", "cpu", torch.float32, repeats=1, **options)


def test_rows_that_fail_or_take_too_long_say_so(tmp_path: Path) -> None:
    made = make_table(tmp_path, limit_s=0.2, ways=["a*"])

    def fails() -> table.Trial:
        raise RuntimeError("no room")

    made.time(fails, way="a1", component="c", n=1, mode="m")
    made.time(lambda: table.Trial(lambda: time.sleep(1)), way="a2", component="c", n=1, mode="m")
    made.time(lambda: table.Trial(lambda: None), way="b", component="c", n=1, mode="m")
    assert [row["way"] for row in made.rows] == ["a1", "a2"]
    assert "no room" in made.rows[0]["status"] and "over the limit" in made.rows[1]["status"]
    assert not made.good(component="c")


def test_nothing_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    made = make_table(tmp_path, stop_s=1e-9)
    with pytest.raises(table.Stopped, match="before c, a at N = 1"):
        made.time(lambda: table.Trial(lambda: None), way="a", component="c", n=1, mode="m")
    assert made.rows == []


def test_break_even() -> None:
    rows = [{"way": "dense", "rank": "", "ms": "2", "steps_200_ms": "401"}]
    for rank, ms, total in ((16, 1, 250), (32, 1.9, 460), (64, 1.8, 390), (128, 9, 2000)):
        rows.append({"way": "f", "rank": f"{rank}", "ms": f"{ms}", "steps_200_ms": f"{total}"})
    one, many = table.break_even(rows, "dense", "f")
    assert one.endswith("up to rank 64 (not at 128)")
    assert many.endswith("up to rank 64 (not at 32, 128)")
    assert "at no rank" in table.break_even(rows[:1] + rows[-1:], "dense", "f")[0]

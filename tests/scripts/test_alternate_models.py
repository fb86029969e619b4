"""Ratios of variants that are called in turn."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import alternate_models as script

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")


def test_every_round_calls_each_once_and_the_order_turns() -> None:
    order: list[int] = []
    calls = [lambda i=i: order.append(i) for i in range(3)]
    times = script.in_rounds(calls, 2, CPU)
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert [len(each) for each in times] == [2, 2, 2]


def test_a_clock_that_drifts_moves_times_and_no_ratios() -> None:
    clock = [1.0, 1.5, 2.0, 4.0]
    found = script.numbers([2 * x for x in clock], clock)
    assert (found["median_ms"], found["ratio"]) == ("3.5000", "2.0000")
    assert (found["ratio_p25"], found["ratio_p75"]) == ("2.0000", "2.0000")


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "a.csv"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "2", "--output", str(output)]
    for model in ("plain-20", "plain-33", "plain-20"):
        monkeypatch.setattr(sys, "argv", ["x", model, "--variants", "none", "exact", *arguments])
        script.main()
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == 2 * ["none", "exact"]
    assert len({row["model"] for row in rows}) == 2  # one of them was replaced
    assert all(float(row["median_ms"]) > 0 and row["how"] == "called" for row in rows)
    assert {row["ratio"] for row in rows if row["variant"] == "none"} == {"1.0000"}


@pytest.mark.parametrize("arguments", [["nothing"], ["plain-20", "--variants", "none", "what"]])
def test_unknown_names(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", *arguments])
    with pytest.raises(SystemExit, match=r"no model is called|has no variant 'what'"):
        script.main()

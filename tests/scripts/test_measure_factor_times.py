"""The script of how long factors take to make; nothing is timed."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_factor_times as script
import row_file

from flashbias_convert.decompose import factor_times
from flashbias_convert.decompose.factor_times import FIELDS, read_times


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> list[row_file.Row]:
    monkeypatch.setattr(sys, "argv", ["script", "--output", str(output), *words])
    script.main()
    return row_file.read(output)


def test_times_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of its class by another program go; those of another class stay."""
    output, timed = tmp_path / "times.csv", []

    def time_ms(job: script.Job) -> float:
        timed.append(job)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return float(len(timed))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(script, "make_call", lambda *job: job)
    monkeypatch.setattr(script, "time_ms", time_ms)
    shared = {"n": "64", "ms": "9", "what": "SVD", "card": "a card", "torch": torch.__version__,
              "source": script.EARLIER}  # fmt: skip
    before = [{**shared, "heads": "2", "rank": "16", "class": "ada"},
              {**shared, "heads": "2", "rank": "16", "class": "hopper"},
              {**shared, "heads": "99", "rank": "8", "class": "hopper"}]  # fmt: skip
    row_file.write(output, FIELDS, before)
    points = ["--heads", "2", "4", "--lengths", "64", "--ranks", "16", "32"]
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, output, *points)
    rows = run(monkeypatch, output, *points, "--resume")
    jobs = [(h, 64, r) for h in (2, 4) for r in (16, 32)]
    assert timed == [*jobs[:3], *jobs[2:]]
    own = [(int(r["heads"]), 64, int(r["rank"])) for r in rows[1:]]
    assert rows[0] == {k: before[0][k] for k in FIELDS} and own == jobs
    assert {(r["source"], r["what"]) for r in rows[1:]} == {(script.SOURCE, script.WHAT)}
    assert run(monkeypatch, output, *points, "--resume") == rows and len(timed) == 5
    found = read_times(output.read_text(), "hopper")
    assert found == {2: {64: [(16, 1.0), (32, 2.0)]}, 4: {64: [(16, 4.0), (32, 5.0)]}}
    again = run(monkeypatch, output, *points)  # without --resume, all of its own
    assert len(timed) == 9 and [r["ms"] for r in again[1:]] == ["6.000", "7.000", "8.000", "9.000"]


def test_the_time_is_the_median_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs do not count; a slow one does not count much."""
    clock = iter([1000.0, 500.0, 3.0, 1.0, 90.0, 2.0, 5.0, 4.0, 6.0])
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return next(clock)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    assert script.time_ms(lambda: happened.append("call")) == 4.0
    assert happened == ["wait", "event", "call", "event", "wait"] * 9


def test_what_the_pairformers_table_has_becomes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the diffusion without the bias, which comes first where two tell of the same."""
    columns = ("n", "mode", "component", "way", "rank", "once_ms", "status", "device", "torch")
    kept, ours = "ours, dense, bias kept", "ours, factors kept"
    table = tmp_path / "pairformer.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for component, way, rank, once, status in (
            ("diffusion step", kept, "", "0.5", "ok"),
            ("diffusion step", ours, "16", "20.5", "ok"),
            ("attention with pair bias", ours, "16", "21", "ok"),
            ("attention with pair bias", ours, "32", "41", "ok"),
            ("triangle attention, starting", ours, "32", "11", "ok"),
            ("triangle attention, ending", ours, "32", "12", "ok"),
            ("block", ours, "32", "70", "ok"),
            ("triangle attention, starting", ours, "96", "", "failed"),
        ):
            row = (768, "inference", component, way, rank, once, status, "NVIDIA H200", "2.11.0")
            writer.writerow(row)
    output = tmp_path / "times.csv"
    other = dict.fromkeys(FIELDS, "1") | {"class": "ada"}
    row_file.write(output, FIELDS, [other])
    first, *rows = run(monkeypatch, output, "--from", str(table))
    assert first == other
    assert [(r["heads"], r["rank"], r["ms"], r["what"]) for r in rows] == [
        ("4", "32", "11.000", script.WITH_BIAS), ("16", "16", "20.000", script.SVD),
        ("16", "32", "41.000", script.WITH_BIAS),
    ]  # fmt: skip
    assert {(r["class"], r["source"]) for r in rows} == {("hopper", script.EARLIER)}


def test_the_committed_rows_are_what_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there are rows of the Pairformer's table, and that is the one they are from."""
    committed = [r for r in row_file.read(script.TABLE) if r["source"] == script.EARLIER]
    made = run(monkeypatch, tmp_path / "t.csv", "--from", str(script.ROOT / script.EARLIER))
    assert not committed or committed == made
    assert factor_times.is_measured("hopper")

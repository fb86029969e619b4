"""Tuning of the inference kernel: what is tried, and what a run leaves for the next."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tune_attention as script

from flashbias_convert.attention import backends
from flashbias_convert.attention.tuning import LaunchSettings

from .fake_pool import FakePool

NAMES = ("N=64 D=64 R=16", "N=144 D=128 R=16")
TRIANGLE = "triangle dense"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a card on which nothing is launched."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    few = {name: replace(script.ALL[name], batch=(2,), heads=2) for name in (*NAMES, TRIANGLE)}
    monkeypatch.setattr(script, "ALL", few)
    monkeypatch.setattr(script.torch.cuda, "get_device_name", lambda: "a card")


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_call_are_seen_without_a_launch(name: str, card: None) -> None:
    settings = script.present(name)
    assert (
        settings
        == {64: LaunchSettings(64, 32, 4, 3, 96), 144: LaunchSettings(64, 64, 4, 2)}[
            script.ALL[name].n
        ]
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_tiles_are_among_what_is_tried(name: str, card: None) -> None:
    tried = script.two_tiles(name)
    assert tried[0] == script.present(name) and len(set(tried)) == len(tried)
    assert {s.tiles for s in tried} == {1, 2}
    for settings in tried:  # a wide product of a tensor core has 64 rows
        assert settings.block_m >= 16 * settings.num_warps


def test_entries_share_a_dense_bias_alone(card: None) -> None:
    assert {s.entries for s in script.two_tiles(TRIANGLE)} == {1, 2}
    assert {s.entries for s in script.two_tiles(NAMES[0])} == {1}


class Run:
    """The script without kernels: what it compiles and times, in order, and its table."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = folder / "table.csv"
        self.compiled: list[tuple[str, LaunchSettings]] = []
        self.timed = 0
        self.states: dict[LaunchSettings, str | None] = {}
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(script, "multiprocessing", FakePool())
        monkeypatch.setattr(script, "run_once", self._compile)
        monkeypatch.setattr(script, "time_ms", self._time)

    def _compile(self, job: tuple[str, LaunchSettings]) -> str | None:
        self.compiled.append(job)
        return self.states.get(job[1], script.OK)

    def _time(self, _: object) -> float:
        self.timed += 1
        return 1.0 + 1.0 / self.timed

    def __call__(self, *words: str) -> list[dict[str, str]]:
        argv = ["tune_attention.py", "--two-tiles", "--output", str(self.output), *words]
        self._monkeypatch.setattr(sys, "argv", argv)
        script.main()
        with self.output.open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: None) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_run_goes_on_where_the_last_one_ended(run: Run) -> None:
    first = run("--shapes", NAMES[0])
    assert len(first) == len(run.compiled) == run.timed
    assert [row["present"] for row in first] == ["1"] + ["0"] * (len(first) - 1)
    both = run("--shapes", *NAMES, "--resume")
    assert both[: len(first)] == first
    assert {name for name, _ in run.compiled[len(first) :]} == {NAMES[1]}
    run("--shapes", *NAMES, "--resume")
    assert len(run.compiled) == len(both)


def test_what_does_not_compile_is_a_row_and_what_lacked_memory_none(run: Run) -> None:
    broken, poor = script.two_tiles(NAMES[0])[1:3]
    run.states = {broken: "OutOfResources: shared memory", poor: None}
    rows = run("--shapes", NAMES[0])
    assert len(rows) == len(run.compiled) - 1 and run.timed == len(rows) - 1
    (failed,) = [row for row in rows if row["state"] != script.OK]
    assert failed["state"] == "OutOfResources: shared memory" and not failed["ms"]
    run.states = {}
    assert len(run("--shapes", NAMES[0], "--resume")) == len(rows) + 1


def test_no_shape_is_begun_when_the_time_is_up(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        run("--shapes", NAMES[0], "--stop-s", "-1")
    assert not run.compiled

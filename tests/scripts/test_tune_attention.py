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
#: dense biases of other calls
OTHERS = ("t5 dense", "pangu dense", "N=144 D=128 dense")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a card on which nothing is launched."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    few = {
        name: replace(script.ALL[name], batch=(2,), heads=2) for name in (*NAMES, TRIANGLE, *OTHERS)
    }
    few["causal"] = replace(few[TRIANGLE], options={"causal": True})
    few["alone"] = replace(few[TRIANGLE], batch=(1,))
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


def test_two_entries_are_tried_after_what_a_call_gets(card: None) -> None:
    present, apart, *others = script.two_entries(TRIANGLE)
    assert present == script.present(TRIANGLE) and len(set(others)) == len(others) > 0
    assert apart.entries == 1 and {s.entries for s in others} == {2}
    for settings in others:  # a wide product of a tensor core has 64 rows
        assert settings.block_m >= 16 * settings.num_warps


@pytest.mark.parametrize("name", NAMES)
def test_without_a_shared_bias_there_is_nothing_else_to_try(name: str, card: None) -> None:
    assert script.two_entries(name) == [script.present(name)]


@pytest.mark.parametrize(
    ("name", "shared"),
    [(TRIANGLE, True), ("t5 dense", True), ("pangu dense", True), ("N=144 D=128 dense", False),
     (NAMES[0], False), ("causal", False), ("alone", False)],
)  # fmt: skip
def test_two_entries_are_tried_where_they_share_a_bias(name: str, shared: bool, card: None) -> None:
    assert any(s.entries == 2 for s in script.two_entries(name)) == shared


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
        argv = ["tune_attention.py", "--two-entries", "--output", str(self.output), *words]
        self._monkeypatch.setattr(sys, "argv", argv)
        script.main()
        with self.output.open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: None) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_run_goes_on_where_the_last_one_ended(run: Run) -> None:
    first = run("--shapes", TRIANGLE)
    assert len(first) == len(run.compiled) == run.timed
    assert [row["present"] for row in first] == ["1"] + ["0"] * (len(first) - 1)
    both = run("--shapes", TRIANGLE, OTHERS[0], "--resume")
    assert both[: len(first)] == first
    assert {name for name, _ in run.compiled[len(first) :]} == {OTHERS[0]}
    run("--shapes", TRIANGLE, OTHERS[0], "--resume")
    assert len(run.compiled) == len(both)


def test_what_does_not_compile_is_a_row_and_what_lacked_memory_none(run: Run) -> None:
    broken, poor = script.two_entries(TRIANGLE)[-2:]
    run.states = {broken: "OutOfResources: shared memory", poor: None}
    rows = run("--shapes", TRIANGLE)
    assert len(rows) == len(run.compiled) - 1 and run.timed == len(rows) - 1
    (failed,) = [row for row in rows if row["state"] != script.OK]
    assert failed["state"] == "OutOfResources: shared memory" and not failed["ms"]
    run.states = {}
    assert len(run("--shapes", TRIANGLE, "--resume")) == len(rows) + 1


def test_no_shape_is_begun_when_the_time_is_up(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        run("--shapes", NAMES[0], "--stop-s", "-1")
    assert not run.compiled

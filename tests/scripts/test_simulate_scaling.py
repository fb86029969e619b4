"""Seconds on several processes, from seconds of the parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import simulate_scaling as script


def test_the_process_with_most_to_do_decides() -> None:
    parts = [1.0, 5.0, 2.0, 3.0, 4.0]
    assert script.slowest(parts, parts, 2) == 8.0  # 5 + 2 + 1 and 4 + 3
    assert script.slowest(parts, [1.0] * 5, 2) == 8.0  # 1 + 2 + 4 and 5 + 3
    assert script.slowest(parts, [1.0, 1.0, 9.0, 1.0, 1.0], 2) == 13.0  # 2 and all others
    assert script.slowest(parts, parts, 1) == 15.0
    assert script.slowest(parts, parts, 64) == 5.0


def test_steps_wait_for_each_other_and_the_rest_stays() -> None:
    parts = [[1.0, 3.0], [2.0, 2.0]]
    found = script.Measured(parts, parts, total=9.0, exchange=0.5)
    assert found.other == 1.0
    assert found.on(1) == 9.0  # nothing is exchanged
    assert found.on(2) == 1.0 + 0.5 + 3.0 + 2.0
    assert found.bound(2) == pytest.approx(9.0 / (1.0 + 0.5 + 3.0 + 2.0))
    assert all(found.bound(p) >= found.total / found.on(p) for p in script.PROCESSES)


@pytest.mark.parametrize("name", list(script.JOBS)[2:])
def test_every_part_is_timed(name: str) -> None:
    found = script.measure(name, tiny=True)
    assert [len(step) for step in found.steps] == [2]
    assert all(seconds >= 0 for step in found.steps for seconds in step)
    assert sum(map(sum, found.steps)) <= found.total


def test_runs_of_the_original_are_parts_of_a_calibration() -> None:
    found = script.measure("calibration of 8 sites", tiny=True)
    assert len(found.steps[-1]) == 2  # one for each input, and exchanged by nobody
    assert len(found.steps) == len(found.costs) > 3  # forms, what they change, then runs

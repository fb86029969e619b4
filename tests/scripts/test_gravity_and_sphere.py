"""The script of the paper's diverse biases: its formulas, and a run of the smallest size."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import fit_in_time  # noqa: E402
import gravity_and_sphere as script  # noqa: E402

from flashbias_convert.decompose.neural_options import FitOptions  # noqa: E402


def test_both_forms_of_the_distance_on_a_sphere_agree() -> None:
    draw = torch.Generator().manual_seed(0)
    angles = script.angles(20, draw).double()
    lat, lon = angles.unbind(-1)
    vectors = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], -1)
    dense = script.great_circle(angles, angles)
    assert dense.shape == (1, 20, 20) and dense.min() >= 0 and dense.max() <= torch.pi
    # an arc and its chord: opposite points lose half the digits
    torch.testing.assert_close(script.chord_to_arc(vectors, vectors), dense, atol=1e-7, rtol=1e-7)
    arcs = (vectors @ vectors.T).clamp(-1, 1).acos()
    torch.testing.assert_close(dense[0], arcs, atol=1e-7, rtol=1e-7)


def test_gravity() -> None:
    x = torch.tensor([[0.0, 0.0], [0.3, 0.4]])
    expected = torch.tensor([[[100.0, 1 / 0.26], [1 / 0.26, 100.0]]])
    torch.testing.assert_close(script.gravity(x, x), expected)


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = ["script", "--tiny", "--cases", "gravity", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", options)
    script.main()
    before = (tmp_path / "gravity_and_sphere.csv").read_text()
    monkeypatch.setattr(sys, "argv", [*options, "--resume"])
    script.main()
    assert (tmp_path / "gravity_and_sphere.csv").read_text() == before
    with (tmp_path / "gravity_and_sphere.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert len(rows) == 9 and (tmp_path / "gravity_and_sphere.png").stat().st_size > 0
    best = float(rows["SVD, raw"]["raw_error"])
    for method in ("networks", "networks, no training", "networks, as in the paper"):
        assert float(rows[method]["raw_error"]) >= best * (1 - 1e-4)  # rounded to five digits
    centred = float(rows["SVD, rows centred"]["centred_error"])
    assert float(rows["SVD + diagonal"]["centred_error"]) <= centred
    assert {row["device"].split(",")[0] for row in rows.values()} == {"CPU"}
    assert {row["points"] for row in rows.values()} == {"24"}
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_a_case_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--points", "24", "--cases", "gravity", "--case-s", "1e-9"]
    monkeypatch.setattr(sys, "argv", ["script", *size, "--output", str(tmp_path)])
    script.main()
    with (tmp_path / "gravity_and_sphere.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and all(row["status"].startswith("not begun") for row in rows)


class FakeFit:
    """A fit whose steps and checks take a known time, on a clock of its own."""

    def __init__(self, step: float, check: float) -> None:
        self.now, self.step, self.check, self.slow = 0.0, step, check, 1.0
        self.done: list[int] = []

    def __call__(self, options: FitOptions, progress: Callable[[Any], None]) -> Any:
        at = 0
        self.done.append(options.steps)
        while True:
            self.now += self.check
            progress(SimpleNamespace(step=at))
            if at >= options.steps:
                return options
            more = min(options.check_every, options.steps - at)
            at, self.now = at + more, self.now + more * self.step * self.slow


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFit:
    made = FakeFit(step=0.01, check=0.5)
    monkeypatch.setattr(fit_in_time, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_fit_takes_the_steps_that_there_is_time_for(fake: FakeFit) -> None:
    found = fit_in_time.fit_in(fake, FitOptions(steps=10_000, check_every=500), 60.0)
    assert 0.6 * 60 < fake.now <= 60 and 0 < found.steps < 10_000


def test_a_fit_with_time_enough_takes_all_steps(fake: FakeFit) -> None:
    assert fit_in_time.fit_in(fake, FitOptions(steps=1000), 60.0).steps == 1000
    fit_in_time.fit_in(fake, FitOptions(steps=70), math.inf)
    assert fake.done[-1] == 70


def test_a_fit_that_slows_down_is_stopped(fake: FakeFit) -> None:
    real = fake.__call__

    def slows(options: FitOptions, progress: Callable[[Any], None]) -> Any:
        fake.slow = 3.0 if options.steps > 100 else 1.0
        return real(options, progress)

    with pytest.raises(fit_in_time.TookTooLong, match="over the limit of 60 s"):
        fit_in_time.fit_in(slows, FitOptions(steps=10_000, check_every=100), 60.0)

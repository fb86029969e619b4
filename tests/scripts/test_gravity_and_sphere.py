"""The script of the paper's diverse biases: its formulas, and a run of the smallest size."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import gravity_and_sphere as script  # noqa: E402


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
    size = ["--points", "24", "--steps", "2", "--tokens", "16", "--rank", "3", "--hidden", "8"]
    monkeypatch.setattr(
        sys, "argv", ["script", *size, "--cases", "gravity", "--output", str(tmp_path)]
    )
    script.main()
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

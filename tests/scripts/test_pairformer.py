"""The script of the Pairformer block: its ways agree, and a run of the smallest size."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import pairformer as script  # noqa: E402
import pairformer_block as parts  # noqa: E402

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


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--tiny", "--no-compile", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["script", *options, "--output", str(tmp_path)])
    script.main()
    with (tmp_path / "pairformer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows if row["way"] != "cuEquivariance"} == {"ok"}
    assert (tmp_path / "pairformer.png").stat().st_size > 0
    assert {row["mode"] for row in rows} == {"inference", "training"}
    for row in rows:
        if row["error"] and not row["rank"] and row["way"] != "cuEquivariance":
            assert float(row["error"]) < 1e-5
    kept = [row for row in rows if row["way"] == "ours, factors kept"]
    assert kept and all(float(row["once_ms"]) > 0 and float(row["error"]) > 1e-5 for row in kept)

"""Small tables: both ways compute the same, and the picture is drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_small_tables as script


@pytest.mark.parametrize("name", script.SHAPES)
def test_both_ways_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    with torch.no_grad():
        found, expected = (call().float() for call in script.ways(name, 2, "cpu").values())
    # bf16 rounds scores, weights and outputs
    assert (found - expected).abs().max() < 8 * 2**-8 * expected.abs().max()
    windows, heads, n, _, _, wide = script.SHAPES[name]
    assert found.shape == (2 * windows, heads, n, wide)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"shape": name, "images": "2", "way": way, "ms": "0.5", "ratio": "1", "card": "a card"}
        for name in script.SHAPES
        for way in ("original, compiled", "flashbias")
    ]
    script.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000

"""The clock of training steps: a run of the smallest size, in which nobody is timed seriously."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_training as script  # noqa: E402

NAMES = [script.OURS, script.NO_BIAS, script.SDPA]


@pytest.mark.parametrize("model", ["gpt2", "plain"])
@pytest.mark.parametrize("options", [[], ["--learnable", "--checkpoint"]], ids=["", "learnable"])
def test_a_run(
    model: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.SIZES, model, (1, 32, 4, 64, 64))
    output = tmp_path / "table.csv"
    words = [model, "--tokens", "24", "--repeats", "3", "--backend", "sdpa", "--device", "cpu",
             "--dtype", "float32", "--attention", *NAMES, "--output", str(output)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["script", *words, *options])
    script.main()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["attention"] for row in rows] == NAMES
    for row in rows:
        assert row["status"] == "ok" and float(row["median_ms"]) > 0
        if row["attention"] != script.NO_BIAS:
            assert float(row["error"]) < 100 * torch.finfo(torch.float32).eps
    own = {"gpt2": 4, "plain": 2 * 4 * 24 * script.RANK}[model]
    sizes = int(rows[0]["parameters"])
    without = sizes - own if options else sizes
    assert without == sum(
        p.numel() for p in script.Model(_args(model), torch.nn.Identity()).parameters()
    )


def _args(model: str) -> object:
    import argparse

    return argparse.Namespace(
        model=model, channels=None, heads=None, layers=1, checkpoint=False, compile=False
    )

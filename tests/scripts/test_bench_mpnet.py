"""The script that measures MPNet: what it compares is the converted file, loaded again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_mpnet

from flashbias_convert.swap import patched_modules
from tests.support import assert_parity

CPU = torch.device("cpu")


@torch.no_grad()
def test_original_and_converted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench_mpnet.original(None, tiny=True)
    converted = bench_mpnet.convert(model, tmp_path)
    case = bench_mpnet.timed("tiny", model, converted, tiny=True)
    states = {}
    for way, dtype in (("original", torch.float64), ("original", torch.float32), ("ours", None)):
        ready = case.prepare(way, CPU, dtype or torch.float32)
        assert len(patched_modules(ready.model)) == (2 if way == "ours" else 0)
        states[way, dtype] = ready.model(*ready.args, **ready.kwargs).last_hidden_state
    truth, plain, ours = states.values()
    assert_parity(ours, plain, truth)

    monkeypatch.setattr(bench_mpnet, "LENGTHS", (16, 40))
    rows = bench_mpnet.cosines(model, converted, CPU, ["bfloat16"])
    assert [(row["tokens"], row["dtype"]) for row in rows] == [
        (16, "float32"), (40, "float32"), (16, "bfloat16"), (40, "bfloat16"),
    ]  # fmt: skip
    assert all(float(row[way]) > 0.99999 for row in rows[:2] for way in ("original", "ours"))
    assert all(0.99 < float(row[way]) < 1 for row in rows[2:] for way in ("original", "ours"))


def test_a_file_in_half_precision_is_measured_against_float32(tmp_path: Path) -> None:
    bench_mpnet.original(None, tiny=True).half().save_pretrained(tmp_path)
    assert bench_mpnet.stored(tmp_path) == "float16"
    assert bench_mpnet.original(tmp_path, tiny=True).dtype == torch.float32
    assert bench_mpnet.stored(None) is None

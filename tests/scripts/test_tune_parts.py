"""The sweep over numbers of parts: a run of the smallest size, and what it says of a table."""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tune_parts as script
from turns import BESIDE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CARD = torch.cuda.is_available() and not INTERPRETED


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way of ours computes the formula in fp32; without a card cuDNN has none."""
    if not (ON_CARD or INTERPRETED):
        pytest.skip("the kernel needs a GPU or TRITON_INTERPRET=1")
    output = tmp_path / "table.csv"
    words = ["--tiny", "--dtype", "float32", "--stop-s", "0", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    script.main()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    ours = [(r["bias"], r["way"], r["parts"]) for r in rows if "ours" in r["way"]]
    assert ours == [
        (bias, way, parts)
        for bias in ("none", "alibi")
        for way, parts in ((script.RULE, "1"), ("ours", "1"), ("ours", "2"))
    ]
    for row in rows:
        if "ours" in row["way"]:
            assert row["state"] == "ok" and float(row["error"]) < 1e-5, row
    assert "with 1 parts, one part" in capsys.readouterr().out


def test_what_it_tells() -> None:
    own = {"batch": "1", "heads": "2", "d": "16", "keys": "70", "bias": "none", "state": "ok"}
    rows = [
        {**own, "way": script.RULE, "parts": "2", "median_us": "6.00"},
        {**own, "way": "ours", "parts": "1", "median_us": "9.00"},
        {**own, "way": "ours", "parts": "4", "median_us": "5.00"},
        {**own, "way": "ours", "parts": "8", "median_us": "1.00", "state": "wrong"},
        {**own, "way": "flash, no bias", "parts": "", "median_us": "7.00"},
        {**own, "keys": "80", "way": script.RULE, "parts": "2", "median_us": "6.00"},
    ]
    assert list(script.told(rows)) == [
        "1 x 2 x 16 x 70 none: 6.00 us with 2 parts, one part 9.00, best 5.00 with 4"
        "; flash, no bias 7.00"
    ]


def test_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a row, also a failed one, is not measured; what lacked memory beside others is."""
    pytest.importorskip("triton")
    calls: list[int] = []

    def measured(case: script.Case, *_: Any) -> dict[str, Any] | None:
        calls.append(1)
        return None if len(calls) == 2 else {"median_us": "1.00", "state": "ok"}

    monkeypatch.setattr(script, "measured", measured)
    output = tmp_path / "table.csv"
    words = ["script", "--tiny", "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    every, first = len(calls), _rows(output)
    assert len(first) == every - 1
    monkeypatch.setattr(sys, "argv", [*words, "--resume"])
    script.main()
    assert len(calls) == every + 1 and _rows(output)[:-1] == first
    script.main()
    monkeypatch.setattr(sys, "argv", [*words[:-4], "--dtype", "float16", *words[-2:], "--resume"])
    assert len(calls) == every + 1
    script.main()
    assert len(calls) == 2 * every + 1 and len(_rows(output)) == 2 * every


def _rows(output: Path) -> list[dict[str, str]]:
    with output.open() as file:
        return list(csv.DictReader(file))


def test_a_card_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all that follows would be rows that fail, and stay."""
    pytest.importorskip("triton")
    state = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(script, "measured", lambda *_: {"state": state})
    output = tmp_path / "table.csv"
    words = ["script", "--tiny", "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        script.main()
    assert [r["state"] for r in _rows(output)] == [state]


def test_memory_that_others_have_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    options = argparse.Namespace(device="cpu", dtype="float32", tiny=True)
    case = script.Case.make(1, 2, 16, 8, options)
    found = script.measured(case, None, lacks, contextlib.nullcontext())
    assert found is not None and found["state"].startswith("OutOfMemoryError")
    monkeypatch.setenv(BESIDE, "/nowhere")
    assert script.measured(case, None, lacks, contextlib.nullcontext()) is None

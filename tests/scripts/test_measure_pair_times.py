"""The script of how long biases of pairs take to make; nothing is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_pair_times as script
import row_file

from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.decompose import pair_times

POINTS = ["--lengths", "8", "12", "--heads", "2", "--channels", "6", "--ranks", "3"]


@pytest.mark.filterwarnings(f"ignore::{BackendFallbackWarning.__module__}.BackendFallbackWarning")
@pytest.mark.parametrize("what", ["linear", "norm and linear", "laying out", "networks"])
def test_the_two_calls_differ_by_who_makes_the_term(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (what, 0 if what == "laying out" else 6, 2, 3 if what == "networks" else 0)
    made: list[Tensor] = []
    build = script.maker

    def counted(*job: object) -> script.Make:
        make = build(*job)  # type: ignore[arg-type]
        return lambda: made.append(torch.empty(0)) or make()  # type: ignore[func-returns-value]

    monkeypatch.setattr(script, "maker", counted)
    whole, without = script.calls(place, 12, "cpu")
    with torch.no_grad():
        assert len(made) == 1
        first = whole()
        assert len(made) == 2
        assert torch.equal(first, without()) and len(made) == 2
        assert first.shape == (1, 2, 12, script.HEAD_DIM) and first.dtype == torch.bfloat16


def test_rows_are_read_by_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, resumed, and noise is no time below nothing."""
    output, timed = tmp_path / "times.csv", []

    def time_ms(call: float) -> float:
        timed.append(call)
        if len(timed) == 6:
            raise KeyboardInterrupt
        return call

    def calls(place: pair_times.Place, n: int, device: str) -> tuple[float, float]:
        return (3.0, 1.0) if place[0] == "networks" else (1.0, 2.0 - n / 12)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(script, "time_ms", time_ms)
    monkeypatch.setattr(script, "calls", calls)
    monkeypatch.setattr(script, "norm_call", lambda channels, n, device: channels + n)
    monkeypatch.setattr(sys, "argv", ["script", "--output", str(output), *POINTS])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert len(row_file.read(output)) == 3
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    script.main()
    rows = row_file.read(output)
    assert len(rows) == 10 and len(timed) == 6 + 2 * 6 + 1
    found = pair_times.read_times(output.read_text(), "hopper")
    assert found == {
        ("linear", 6, 2, 0): [(8, 0.0), (12, 0.0)],
        ("norm and linear", 6, 2, 0): [(8, 0.0), (12, 0.0)],
        ("laying out", 0, 2, 0): [(8, 0.0), (12, 0.0)],
        ("networks", 6, 2, 3): [(8, 2.0), (12, 2.0)],
        ("norm", 6, 0, 0): [(8, 14.0), (12, 18.0)],
    }

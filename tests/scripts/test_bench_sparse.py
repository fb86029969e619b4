"""The script of the sparse part: its closed form, its kernel, and a run of the smallest size."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_sparse as script  # noqa: E402
import sparse_correction  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CARD = torch.cuda.is_available() and not INTERPRETED


def make(dtype: torch.dtype = torch.float32) -> script.Gravity:
    return script.Gravity(37, 2, 16, "cuda" if ON_CARD else "cpu", dtype)


def test_cells_are_exact_and_leave_the_rest() -> None:
    case = make()
    term, cells = case.parts(3, 4)
    exact = case.matrix(case.rows, torch.float64) * case.strength.double()[:, None, None]
    exact = exact - exact.mean(-1, keepdim=True)
    made = script.with_cells(case, term, cells)
    at = cells.index[case.rows].long().expand(2, -1, -1)
    # fp32 throughout
    torch.testing.assert_close(made.gather(-1, at), exact.gather(-1, at), atol=1e-5, rtol=1e-5)
    elsewhere = torch.ones_like(made).scatter_(-1, at, 0.0).bool()
    low = script.low_rank(case, term)
    assert torch.equal(made[elsewhere], low[elsewhere])
    assert cells.index.sort(-1).values.diff(dim=-1).min() > 0  # no key twice


@pytest.mark.parametrize("kernel", [False, True])
def test_the_closed_form(kernel: bool) -> None:
    """In fp32 within twice the error of plain fp32 attention, both against float64."""
    if kernel and not (ON_CARD or INTERPRETED):
        pytest.skip("the kernel needs a GPU or TRITON_INTERPRET=1")
    case = make()
    term, cells = case.parts(3, 4)
    correct = getattr(sparse_correction, "corrected_by_kernel" if kernel else "corrected")
    way = script.added_afterwards(case, term, cells, correct)
    truth = case.truth(way.means)
    plain = (case.q[0] @ case.k[0].mT * case.scale + way.means.float()).softmax(-1) @ case.v[0]
    allowed = 2 * float((plain.double() - truth).norm())
    assert float((way.call()[0].double() - truth).norm()) <= allowed
    without = script.main_pass(case, term)()[0]
    assert float((without[0].double() - truth).norm()) > 100 * allowed  # cells count


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    if ON_CARD or INTERPRETED:
        pytest.skip("the smallest size is for a CPU without the interpreter")
    output = tmp_path / "s.csv"
    monkeypatch.setattr(sys, "argv", ["script", "--tiny", "--output", str(output)])
    script.main()
    with output.open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    for name in ("ours, dense", "ours, look-up", script.TORCH, "factors + cells, look-up"):
        assert rows[name]["state"] == "ok" and float(rows[name]["own_error"]) < 1e-6
    assert float(rows[script.TORCH]["error"]) < float(rows["factors alone"]["error"])
    assert rows[script.KERNEL]["state"] != "ok"  # there is no card
    assert output.with_suffix(".png").stat().st_size > 0
    before = output.read_text()
    monkeypatch.setattr(sys, "argv", ["script", "--tiny", "--resume", "--output", str(output)])
    script.main()
    assert output.read_text() == before


def test_whether_it_pays() -> None:
    row = {"n": "8", "kept": "", "state": "ok", "error": "0.1"}
    rows = [{**row, "way": "ours, dense", "median_ms": "3"},
            {**row, "way": script.KERNEL, "kept": "2", "median_ms": "2"},
            {**row, "way": script.KERNEL, "kept": "4", "median_ms": "4"}]  # fmt: skip
    pays, not_ = script.told(rows)
    assert "pays: 2.000 ms, 1.50 times as fast as ours, dense" in pays
    assert "does not pay" in not_

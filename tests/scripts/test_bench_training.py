"""The clock of training steps: runs of the smallest size, in which nobody is timed seriously."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_training as script  # noqa: E402
import training_figure  # noqa: E402
import training_models  # noqa: E402
from turns import BESIDE  # noqa: E402

from .turns_here import in_turns_here  # noqa: E402

NAMES = [script.OURS, script.NO_BIAS, script.SDPA]
TINY = (1, 32, 4, 64, 64)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "in_turns", in_turns_here)
    for model in ("gpt2", "plain"):
        monkeypatch.setitem(training_models.SIZES, model, TINY)


def run(monkeypatch: pytest.MonkeyPatch, output: Path, model: str, *words: str) -> None:
    own = ["--tokens", "24", "--repeats", "3", "--backend", "sdpa", "--device", "cpu",
           "--dtype", "float32", "--attention", *NAMES, "--output", str(output)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["script", model, *own, *words])
    script.main()


def rows_of(output: Path) -> list[dict[str, str]]:
    with output.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("model", ["gpt2", "plain"])
@pytest.mark.parametrize("options", [[], ["--learnable", "--checkpoint"]], ids=["", "learnable"])
def test_a_run(
    model: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "table.csv"
    run(monkeypatch, output, model, *options)
    rows = rows_of(output)
    assert [row["attention"] for row in rows] == NAMES
    for row in rows:
        assert row["status"] == "ok" and float(row["median_ms"]) > 0
        if row["attention"] != script.NO_BIAS:
            worst = max(float(row["error_loss"]), float(row["error_gradient"]))
            assert worst < 100 * torch.finfo(torch.float32).eps
    own = {"gpt2": 4, "plain": 2 * 4 * 24 * training_models.RANK}[model]
    sizes = int(rows[0]["parameters"])
    without = sizes - own if options else sizes
    attend: Any = torch.nn.Identity()
    model_of = training_models.Model(_args(model), attend)
    assert without == sum(p.numel() for p in model_of.parameters())
    assert "flashbias" in output.with_suffix(".md").read_text()
    assert output.with_suffix(".png").stat().st_size > 0
    run(monkeypatch, output, model, *options, "--resume")
    assert len(rows_of(output)) == len(rows)


def _args(model: str) -> argparse.Namespace:
    return argparse.Namespace(model=model, channels=None, heads=None, layers=1, checkpoint=False,
                              compile=False, device="cpu", learnable=False, dtype="float32",
                              batch=1, backend="sdpa")  # fmt: skip


def test_no_bias_is_no_way_to_add_one() -> None:
    for model in ("gpt2", "plain"):
        loss, gradient = training_models.step_errors(script.NO_BIAS, _args(model), 24)
        assert gradient > 1e-3 > 100 * torch.finfo(torch.float32).eps and loss > 1e-6, model


def test_the_matrix_is_made_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dense bias of more than one head, and the same one trained and frozen."""
    made = []
    dense = training_models.ScoreBias.dense

    def watched(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(self.num_heads)
        found: torch.Tensor = dense(self, *args, **kwargs)
        return found

    monkeypatch.setattr(training_models.ScoreBias, "dense", watched)
    for model in ("gpt2", "plain"):
        case = training_models.Case(_args(model), 24)
        truth = dense(case.bias(), 24, 24)
        case.args.learnable = False
        frozen = case.matrix(torch.float32)
        case.args.learnable = True
        assert torch.equal(frozen, case.matrix(torch.float32))
        seen = frozen[0].isfinite()
        assert torch.allclose(frozen[0][seen], truth[seen], rtol=1e-6, atol=1e-6)
        assert bool(seen.all()) == (model == "plain")
    assert set(made) == {1}


def test_a_process_that_dies_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = script.timed

    def dies(name: str, *args: Any) -> dict[str, Any]:
        if name == script.SDPA:
            raise SystemExit(1)
        if name == script.OURS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(name, *args)

    monkeypatch.setattr(script, "timed", dies)
    run(monkeypatch, tmp_path / "table.csv", "plain")
    states = {row["attention"]: row["status"] for row in rows_of(tmp_path / "table.csv")}
    assert states == {script.OURS: script.OUT_OF_MEMORY, script.NO_BIAS: "ok",
                      script.SDPA: script.CRASHED}  # fmt: skip
    told = training_figure.tables(tmp_path / "table.csv")
    assert script.OUT_OF_MEMORY in told and script.CRASHED in told


def test_the_clock_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, tmp_path / "table.csv", "plain", "--stop-s", "-1")
    assert not rows_of(tmp_path / "table.csv")


def test_want_of_memory_beside_others_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(name: str, *args: Any) -> dict[str, Any]:
        if name == wants:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"status": "ok"}

    wants, output = script.SDPA, tmp_path / "table.csv"
    monkeypatch.setattr(script, "timed", lacks)
    monkeypatch.setattr(script, "draw", lambda _: None)
    monkeypatch.setenv(BESIDE, "/nowhere")
    run(monkeypatch, output, "plain")
    assert [row["attention"] for row in rows_of(output)] == [script.OURS, script.NO_BIAS]
    monkeypatch.setattr(script, "judged", lacks)  # a small step may lack it as well
    run(monkeypatch, output, "plain", "--resume")
    assert len(rows_of(output)) == 2
    wants = ""
    run(monkeypatch, output, "plain", "--resume")
    assert [row["attention"] for row in rows_of(output)][2:] == [script.SDPA]

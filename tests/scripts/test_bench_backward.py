"""The clock of forward and backward passes, at sizes at which nobody is timed seriously."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import backward_figure  # noqa: E402
import backward_step  # noqa: E402
import bench_backward as script  # noqa: E402
from turns import BESIDE  # noqa: E402

CPU = torch.device("cpu")
PEERS = ["ours, sdpa path", "flash, no bias", "cudnn, dense"]
NAMES = ["swinv2b-s3 R=16", "swinv2b-s1 shift R=16 cosine", "alibi gpt2"]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    words = ["--tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "3", "--shapes",
             *NAMES, "--peers", *PEERS, "--output", str(tmp_path / "table.csv")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["script", *words])
    return script.arguments()


def here(monkeypatch: pytest.MonkeyPatch, fails: Any = lambda job: False) -> list[script.Job]:
    """Jobs run in this process, one after the other; returns those that ran."""
    ran = []

    def in_turns(job: Any, calls: list[Any], *, seconds: float | None = None) -> list[Any]:
        lost = []
        for call in calls:
            ran.append(*call)
            try:
                if fails(*call):
                    raise SystemExit(1)
                job(*call, lambda: None)
            except SystemExit:
                lost.append(call)
        return lost

    monkeypatch.setattr(script, "in_turns", in_turns)
    return ran


def rows_of(options: argparse.Namespace) -> list[dict[str, str]]:
    with options.output.open() as file:
        return list(csv.DictReader(file))


def test_a_run(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch)
    script.run(script._begin(options), options)
    rows = rows_of(options)
    assert [(r["shape"], r["bias"], r["peer"]) for r in rows] == [
        (n, b, p) for n in NAMES for b in ("frozen", "trained") for p in PEERS
    ]
    for row in rows:
        if row["peer"] == "cudnn, dense":  # needs a card
            assert row["state"].startswith("RuntimeError") and not row["call_ms"]
            continue
        assert row["state"] == "ok"
        assert min(float(row["call_ms"]), float(row["forward_call_ms"])) > 0
        errors = [float(row[name]) for name in backward_step.GRADIENTS]
        assert max(errors) < 100 * torch.finfo(torch.float32).eps, row
    options.resume = True
    assert script._begin(options) == []


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_truth_in_chunks_is_that_of_one_piece(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NAMES, "sam-b global axial", "t5 dense", "t5 table"):
        shape = script.shape_of(name, True)
        problem = backward_step.Problem.of(shape, True, torch.float32, CPU)
        monkeypatch.setattr(backward_step, "ROWS", 7)
        chunks = backward_step.truth(problem, has_bias)
        monkeypatch.setattr(backward_step, "ROWS", 2048)
        for a, b in zip(chunks, backward_step.truth(problem, has_bias), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), name


def test_a_wrong_gradient_is_marked(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = script.shape_of(NAMES[0], True)
    problem = backward_step.Problem.of(shape, False, torch.float32, CPU)
    made = dict((peer.name, make) for peer, make in backward_step.steps(problem))
    told, _ = script.ready(made["flash, no bias"], backward_step.truth(problem, True), CPU)
    assert told["state"] == "wrong"


def test_every_tensor_of_a_trained_bias_gets_a_gradient() -> None:
    for name in (*NAMES, "sam-b global axial", "t5 dense", "t5 table"):
        shape = script.shape_of(name, True)
        problem = backward_step.Problem.of(shape, True, torch.float32, CPU)
        made = dict((peer.name, make) for peer, make in backward_step.steps(problem))
        step = made["ours, sdpa path"]()
        assert problem.leaves() and len(step.wanted) == 3 + len(problem.leaves())
        for leaf, gradient in zip(step.wanted, step(), strict=True):
            assert gradient.shape == leaf.shape and bool(gradient.any()), name


def test_a_process_that_dies_costs_one_row(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a peer is in a process with the one that kills it, nothing is told."""
    options.shapes, options.bias = NAMES[:1], ["frozen"]
    killer = "flash, no bias"
    ran = here(monkeypatch, lambda job: job.peers is None or killer in job.peers)
    script.run(script._begin(options), options)
    states = {r["peer"]: r["state"] for r in rows_of(options)}
    assert states.pop(killer) == script.CRASHED
    assert states["ours, sdpa path"] == "ok" and len(states) == 2
    assert all(job.alone for job in ran[1:])


def test_a_peer_that_lacks_memory_beside_others_is_tried_alone(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.shapes, options.bias = NAMES[:1], ["frozen"]
    ran = here(monkeypatch)

    def lacks(self: backward_step.Step) -> list[torch.Tensor]:
        if not ran[-1].alone and len(self.wanted) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(torch.autograd.grad(self.forward(), self.wanted, self.dout))

    monkeypatch.setattr(backward_step.Step, "__call__", lacks)
    script.run(script._begin(options), options)
    assert [job.alone for job in ran] == [False, True]
    assert [r["state"] for r in rows_of(options)].count("ok") == 2


def test_the_clock_stops(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    options.stop_s = -1.0
    ran = here(monkeypatch)
    script.run(script._begin(options), options)
    assert not ran and not rows_of(options)


def test_ratios(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    rows = [("ours", "2.0", "ok"), ("efficient, dense", "3.0", "ok"), ("flex", "1", "wrong"),
            ("ours, sdpa path", "0.5", "ok"), ("flash, no bias", "1.0", "ok")]  # fmt: skip
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, script.FIELDS)
        writer.writeheader()
        for peer, ms, state in rows:
            row = {"shape": "a", "bias": "frozen", "peer": peer, "state": state, "card": "x"}
            writer.writerow({**row, "step_ms": ms, "call_ms": ms})
    (found,) = backward_figure.ratios(file)
    assert (found["with"], found["ratio_with"]) == ("efficient, dense", 1.5)
    assert (found["without"], found["ratio_without"]) == ("flash, no bias", 0.5)
    assert "2.00x (flash)" in backward_figure.table(file)
    pytest.importorskip("matplotlib")
    backward_figure.draw(file)
    assert os.path.getsize(tmp_path / "table.png") > 0


def test_no_clock_is_mixed_with_another(tmp_path: Path) -> None:
    """What has no graph is compared by calls, beside what has one: the one that takes least."""
    file = tmp_path / "table.csv"
    rows = [("ours", "1.0", "2.0"), ("flex, dense", "", "1.5"), ("closed form", "3.0", "9.0"),
            ("cudnn, no bias", "0.8", "1.0")]  # fmt: skip
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, script.FIELDS)
        writer.writeheader()
        for peer, step, call in rows:
            row = {"shape": "a", "bias": "trained", "peer": peer, "state": "ok", "card": "x"}
            writer.writerow({**row, "step_ms": step, "call_ms": call})
    (found,) = backward_figure.ratios(file)
    assert (found["with"], found["ratio_with"]) == ("flex, dense, in calls", 0.75)
    assert (found["without"], found["ratio_without"]) == ("cudnn, no bias", 0.8)


def test_a_lost_card_is_the_fault_of_who_lost_it() -> None:
    """Whatever wraps the failure: peers that come after it would be blamed."""
    for problem in (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        ValueError("CUDA error: unspecified launch failure"),
    ):
        assert script._state(problem) == script.CRASHED
    assert script._state(RuntimeError("No available kernel.")).startswith("RuntimeError")


def test_want_of_memory_beside_other_commands_is_no_row(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried alone in its command first, and then by the next run."""
    options.shapes, options.bias, options.peers = NAMES[:1], ["frozen"], PEERS[:2]
    ran = here(monkeypatch)

    def lacks(self: backward_step.Step) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv(BESIDE, "/nowhere")
    with monkeypatch.context() as wanting:
        wanting.setattr(backward_step.Step, "__call__", lacks)
        script.run(script._begin(options), options)
    assert [job.alone for job in ran] == [False, True] and not rows_of(options)
    options.resume = True
    script.run(script._begin(options), options)
    assert [r["state"] for r in rows_of(options)] == ["ok", "ok"]

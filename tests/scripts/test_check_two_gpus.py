"""Cases on two processes: a row for each, whatever the others do."""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import check_two_gpus as script
from two_gpus import offline, training
from two_gpus.measuring import judged

#: stands for the script in its processes: "hang" hangs, "die" ends with a reason, others pass
WORKER = """
import argparse, faulthandler, json, os, signal, time
from pathlib import Path

faulthandler.register(signal.SIGUSR1)
parser = argparse.ArgumentParser()
for name in ("kind", "folder", "backend", "device", "size", "repeats", "limit-s", "rank"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
folder, first = Path(args.folder), args.rank == "0"
(Path(__file__).parent / f"pid-{args.rank}").write_text(str(os.getpid()))

def deep(levels):
    deep(levels - 1) if levels else innermost()

def innermost():
    time.sleep(600)

def tell(found):
    if first:
        with (folder / "found.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\\n")

def told():
    path = folder / "found.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0

tell({"ready": True})
for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
    while not first and told() <= number:  # all do a case together
        time.sleep(0.01)
    if case.startswith("hang"):
        deep(60)
    if case.startswith("die"):
        if first:
            time.sleep(600)
        (folder / "error-1.txt").write_text("ValueError: broken")
        raise SystemExit(1)
    tell({"status": "passed", "reason": ""})
"""


def run(folder: Path, cases: list[str], **options: Any) -> list[tuple[str, str, str]]:
    given = {"limit_s": 6.0, "stop_s": 60.0, **options}
    args = script.parser().parse_args(["--size", "tiny"])
    for name, value in given.items():
        setattr(args, name, value)
    rows: list[tuple[str, str, str]] = []

    def emit(case: str, found: dict[str, Any]) -> None:
        rows.append((case, found["status"], found["reason"]))

    script.run_all("pair", 2, cases, args, time.monotonic() + args.stop_s, emit)
    return rows


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(script, "SCRIPT", path)
    return path


def test_a_case_that_hangs_or_dies_loses_no_other(
    worker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path, ["a", "hang", "b", "die", "c"])
    assert [(case, status) for case, status, _ in rows] == [
        ("a", "passed"), ("hang", "failed"), ("b", "passed"), ("die", "failed"), ("c", "passed"),
    ]  # fmt: skip
    assert rows[1][2] == "not done after 6 s" and rows[3][2] == "process 1: ValueError: broken"
    assert " in innermost" in capfd.readouterr().err  # where it hung


def test_nothing_is_left_running(worker: Path, tmp_path: Path) -> None:
    run(tmp_path, ["hang"])
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((worker.parent / f"pid-{rank}").read_text()), 0)


def test_what_is_left_when_the_time_is_up_is_told(worker: Path, tmp_path: Path) -> None:
    rows = run(tmp_path, ["hang", "a", "b"], limit_s=600.0, stop_s=1.5)
    assert [status for _, status, _ in rows] == ["failed", "skipped", "skipped"]
    assert all("are over" in reason for _, status, reason in rows if status == "skipped")


def test_processes_that_do_not_begin_fail_every_case(worker: Path, tmp_path: Path) -> None:
    worker.write_text("raise SystemExit(3)")
    rows = run(tmp_path, ["a", "b"])
    assert [(case, status) for case, status, _ in rows] == [("a", "failed"), ("b", "failed")]
    assert all("ended with 3" in reason for _, _, reason in rows)


def test_two_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    output = tmp_path / "two.csv"
    arguments = ["--backend", "gloo", "--device", "cpu", "--only", "structures *"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments, "--repeats", "1", "--output", str(output)])
    assert script.main() == 0
    with output.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "passed" and row["same_bits"] == "True"
    assert float(row["seconds_one"]) > 0 < float(row["seconds_two"])

    # what passed is not run again, what did not is
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume", "--stop-s", "0"])
    assert script.main() == 0
    with output.open(newline="") as file:
        assert list(csv.DictReader(file)) == [row]
    output.write_text(output.read_text().replace(",passed,", ",failed,"))
    script.main()
    with output.open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["skipped"]


def test_other_bits_fail() -> None:
    x = torch.ones(2)
    assert offline.difference({"a": x, "b": 1}, {"a": x.clone(), "b": 1}) == ""
    assert offline.difference({"a": x, "b": 1}, {"a": x, "b": 2}) == "b differs"
    assert offline.difference({"a": x}, {"a": x.nextafter(2 * x)}) == "a differs"
    assert "other parts" in offline.difference({"a": x}, {"b": x})
    assert "other parts" in offline.difference({"a": 1}, {"a": 1})  # nothing was compared


@pytest.mark.parametrize("name", ["swin", "bloom"])
def test_training_on_a_half_of_the_batch_is_not_the_same(name: str) -> None:
    """What two processes would do that do not share their gradients; the whole batch passes."""
    pytest.importorskip({"swin": "timm", "bloom": "transformers"}[name])
    import copy

    model, x = training.prepared(name, "tiny", torch.device("cpu"))
    assert sum(".score_bias." in n for n in training._weights(model)) or name == "bloom"
    wide = x.double() if x.is_floating_point() else x
    truth = training.steps(copy.deepcopy(model).double(), wide, None)
    one = training.steps(copy.deepcopy(model), x, torch.float32)
    half = training.steps(model, x[:1], torch.float32)
    assert judged(one[1], one[1], truth[1])["status"] == "passed"
    assert judged(half[1], one[1], truth[1])["status"] == "failed"
    assert training.losses_problem(one[0], one[0], truth[0], x) == ""
    assert "loss of step 1" in training.losses_problem(half[0], one[0], truth[0], x)
    assert "nothing was learnt" in training.losses_problem(*3 * (one[0][::-1],), x)
    gone = [torch.full_like(loss, torch.nan) for loss in one[0]]
    assert "loss of step 1" in training.losses_problem(gone, one[0], truth[0], x)

"""The suite for a card: what a run that was ended has found is kept, and the next goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_suite
import suite_record

TESTS = """
import time, pytest
from pathlib import Path

HERE = Path(__file__).parent

def test_good(): pass

@pytest.mark.parametrize("way", ["a b", "c"])
def test_named(way): assert way == "c" or (HERE / "repaired").exists()

def test_skipped(): pytest.skip("not here")

@pytest.fixture
def bad_end():
    yield
    assert (HERE / "repaired").exists()

def test_bad_end(bad_end): pass
"""


def pytest_with_record(folder: Path) -> dict[str, str]:
    """Runs `TESTS` in two processes, without what `known` has; returns what was written."""
    environment = {
        **os.environ,
        suite_record.RECORD: str(folder / "record"),
        suite_record.KNOWN: str(folder / "known"),
        "PYTHONPATH": str(gpu_suite.HERE),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "suite_record", "-p",
               "no:cacheprovider", "--rootdir", str(folder), str(folder)]  # fmt: skip
    subprocess.run(command, env=environment, cwd=folder, check=False, capture_output=True)
    return suite_record.read(folder / "record")


def test_outcomes_are_written_and_what_went_well_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    found = {name.partition("::")[2]: how for name, how in pytest_with_record(tmp_path).items()}
    assert found == {
        "test_good": "passed", "test_named[a b]": "failed", "test_named[c]": "passed",
        "test_skipped": "skipped", "test_bad_end": "failed",
    }  # fmt: skip
    (tmp_path / "record").rename(tmp_path / "known")
    (tmp_path / "repaired").touch()
    again = {name.partition("::")[2]: how for name, how in pytest_with_record(tmp_path).items()}
    assert again == {"test_named[a b]": "passed", "test_bad_end": "passed"}


def test_a_record_of_other_code_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite, "digest", lambda folder: "one")
    output = tmp_path / "out" / "suite.json"
    record, known = gpu_suite.record_of(output, resume=True)
    with record.open("a") as file:
        file.write('["t", "passed"]\n["cut", "pas')
    assert suite_record.read(record) == {"code": "one one one", "t": "passed"}
    gpu_suite.record_of(output, resume=True)
    assert suite_record.read(known)["t"] == "passed"
    monkeypatch.setattr(gpu_suite, "digest", lambda folder: "two")
    gpu_suite.record_of(output, resume=True)
    assert suite_record.read(record) == {"code": "two two two"}
    gpu_suite.record_of(output, resume=False)
    assert suite_record.read(known) == {"code": "two two two"}


def test_a_command_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    assert gpu_suite.run([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5) is None
    assert time.monotonic() - began < 30
    assert gpu_suite.run([sys.executable, "-c", "exit(3)"], {}, None) == 3


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    output = tmp_path / "suite.json"

    def of(*words: str) -> dict[str, Any]:
        command = ["gpu_suite.py", "--workers", "1", "--output", str(output), *words]
        monkeypatch.setattr(sys, "argv", command)
        gpu_suite.main()
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    found = of("tests/benchmark/test_rows.py", "-p", "no:cacheprovider")
    assert found["complete"] and found["passed"] >= 7 and not found["failures"]
    assert found["card"] == "a card" and found["suites"] == ["tests/benchmark/test_rows.py"]
    assert list(tmp_path.iterdir()) == [output]
    record, _ = gpu_suite.record_of(output, resume=False)
    tests = [
        f"tests/benchmark/test_rows.py::{name}" for name in ("test_a_long_reason_is_cut", "other")
    ]
    record.write_text(record.read_text() + "".join(f'["{t}", "passed"]\n' for t in tests))
    again = of("--resume", "tests/benchmark/test_rows.py::test_a_long_reason_is_cut")
    assert again["complete"] and again["passed"] == len(tests)
    cut = of("--stop-s", "0.1", "tests/benchmark/test_rows.py")
    assert not cut["complete"]  # how far it came is a matter of luck

"""Run the operator suite and the device suite on this machine's card; write down how it went.

python scripts/gpu_suite.py [--stop-s S] [--resume] [--output FILE.json] [pytest arguments]

How each test went is written at once, into a file beside the output. A run that is ended, by
--stop-s or otherwise, says so ("complete"), and one with --resume runs what has not passed yet, as
long as neither the kernels nor the tests are others by then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import suite_record
import torch
import triton

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: what a result is of
CODE = ("flashbias_convert", "tests/attention", "tests/device")
#: pytest's exit code where no test was chosen
NOTHING_LEFT = 5
#: seconds for pytest to say what it knows, once it is told to end
GRACE_S = 5
SUITES = ("tests/attention", "tests/device")
#: warnings would bury the failures
QUIET = ("--tb=short", "-rfE", "--disable-warnings", "-W", "ignore", "-p", "no:benchmark",
         "-p", "suite_record")  # fmt: skip


def digest(folder: Path) -> str:
    """Of all sources below a folder: says whether a result is that of the code one looks at."""
    found = hashlib.sha256()
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.csv")]):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()[:16]


def record_of(output: Path, *, resume: bool) -> tuple[Path, Path]:
    """The file of outcomes, begun anew if it is of other code, and a copy of what it knows."""
    record, known = output.with_suffix(".tests.jsonl"), output.with_suffix(".known.jsonl")
    code = json.dumps(["code", " ".join(digest(ROOT / folder) for folder in CODE)])
    kept = record.read_text() if resume and record.is_file() else ""
    if not kept.startswith(code):
        kept = code + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(kept)
    known.write_text(kept)
    return record, known


def run(command: list[str], variables: dict[str, str], stop_s: float | None) -> int | None:
    """The exit code of a command whose output is passed on, or None if it was ended."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables})
    try:
        return process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest tells of the failures that it has seen
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def main() -> int:
    """Run pytest on `SUITES`, or on what the arguments name, in parallel processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/gpu_suite.json")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--stop-s", type=float, help="end the run after so many seconds")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed")
    options, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA card", file=sys.stderr)
        return 1
    named = [argument for argument in rest if (ROOT / argument.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.workers), *QUIET, *rest]
    command += [] if named else SUITES
    record, known = record_of(options.output, resume=options.resume)
    places = {
        suite_record.RECORD: str(record),
        suite_record.KNOWN: str(known),
        "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))),
    }
    start = time.time()
    code = run(command, places, options.stop_s)
    if code == NOTHING_LEFT and len(suite_record.read(known)) > 1:
        code = 0
    known.unlink()
    result = told(record, code) | {
        "seconds": round(time.time() - start, 1),
        "suites": named or list(SUITES),
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    if result["complete"] and not result["failures"]:
        record.unlink()
    return int(code != 0)


def told(record: Path, code: int | None) -> dict[str, Any]:
    """What the runs of a record have found, of which the last ended with this code."""
    outcomes = suite_record.read(record)
    del outcomes["code"]
    counts = Counter(outcomes.values())
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "complete": code in (0, 1),
        "attention_sha256": digest(ROOT / "flashbias_convert/attention"),
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failures": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Run the operator suite and the device suite on this machine's card; write down how it went.

python scripts/gpu_suite.py [--output scripts/results/gpu_suite.json] [pytest arguments]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("tests/attention", "tests/device")
#: warnings would bury the failures
QUIET = ("--tb=short", "-rfE", "--disable-warnings", "-W", "ignore", "-p", "no:benchmark")
LONGEST = 20_000  # characters that are printed of tracebacks


def digest(folder: Path) -> str:
    """Of all sources below a folder: says whether a result is that of the code one looks at."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()[:16]


def named_in(line: str) -> str:
    """The test of a line of pytest's summary; its parameters may have spaces."""
    return line.partition(" ")[2].partition(" - ")[0]


def main() -> int:
    """Run pytest on `SUITES`, or on what the arguments name, in parallel processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/gpu_suite.json")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA card", file=sys.stderr)
        return 1
    named = [argument for argument in rest if (ROOT / argument.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.workers), *QUIET, *rest]
    command += [] if named else SUITES
    start = time.time()
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    summary = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    told = "\n".join(line for line in lines if line not in summary)
    print(run.stderr[-2000:], told[-LONGEST:], sep="\n")
    last = next((line for line in reversed(lines) if " in " in line), "")
    counts = {
        name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.time() - start, 1),
        "exit_code": run.returncode,
        "attention_sha256": digest(ROOT / "flashbias_convert/attention"),
        "suites": named or list(SUITES),
        **counts,
        "failures": list(dict.fromkeys(map(named_in, summary))),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    print(*summary, f"{len(summary)} tests failed, exit code {run.returncode}", sep="\n")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Run the whole operator suite on this machine's card and write down how it went.

python scripts/gpu_suite.py [--output scripts/results/gpu_suite.json] [pytest arguments]
"""

from __future__ import annotations

import argparse
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


def main() -> int:
    """Run pytest on tests/attention, tests/recipes and tests/gpu in parallel processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/gpu_suite.json")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA card", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.workers), *rest]
    if not any(not a.startswith("-") for a in rest):
        command += ["tests/attention"]
    start = time.time()
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout[-6000:], run.stderr[-2000:], sep="\n")
    last = next((line for line in reversed(run.stdout.splitlines()) if " in " in line), "")
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.time() - start, 1),
        "exit_code": run.returncode,
        **counts,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())

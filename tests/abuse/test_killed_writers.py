"""A writer that is killed leaves nothing, or something whole, under the final name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from flashbias_convert.checkpoint import read_checkpoint

from .amount import amount
from .conftest import Count
from .killing import MODES


def test_killed(tmp_path: Path, count: Count) -> None:
    moments = amount(4, 40)
    command = [sys.executable, "-W", "ignore", "-m", "tests.abuse.killing"]
    done = subprocess.run(
        [*command, str(tmp_path), str(moments), "0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == list(MODES)
    for mode, found in told.items():
        steps = sum(n for what, n in found["ended"].items() if "between" in what)
        assert steps >= 5, "a commit has more steps than these"
        assert sum(found["ended"].values()) == moments + steps
        for ended, times in found["ended"].items():
            count("kills", f"{mode}: {ended}", times)
        count("hidden files that killed writers left", mode, found["hidden"])
    # what is left beside weights is not taken for weights
    folder = tmp_path / "conversion"
    (folder / "out.plan.json").unlink()
    assert read_checkpoint(folder).files == (folder / "out.safetensors",)

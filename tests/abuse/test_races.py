"""Two writers of one output: one wins whole, and the other says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .amount import amount
from .conftest import Count
from .racing import MODES


def test_races(tmp_path: Path, count: Count) -> None:
    times = amount(5, 50)
    command = [sys.executable, "-W", "ignore", "-m", "tests.abuse.racing", str(tmp_path)]
    done = subprocess.run([*command, str(times)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == list(MODES)
    for mode, found in told.items():
        assert sum(found.values()) == times
        for ended, seen in found.items():
            count("races", f"{mode}: {ended}", seen)

"""Jobs that get ready together and are measured one after the other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from turns import BESIDE, in_turns


def job(number: int, file: str, wait: Callable[[], None]) -> None:
    """Dies before its turn (1) or in it (2); tells when it was alone."""
    if number == 1:
        os._exit(3)
    wait()
    if number == 2:
        os._exit(4)
    for what in ("begins", "ends"):
        with Path(file).open("a") as lines:
            lines.write(f"{number} {what}\n")
        time.sleep(0.05)


def test_turns_come_in_order_and_deaths_are_told(tmp_path: Path) -> None:
    file = str(tmp_path / "told")
    lost = in_turns(job, [(n, file) for n in range(5)])
    assert lost == [(1, file), (2, file)]
    told = Path(file).read_text().splitlines()
    assert told == [f"{n} {what}" for n in (0, 3, 4) for what in ("begins", "ends")]


def test_nobody_has_a_turn_when_the_time_is_up(tmp_path: Path) -> None:
    file = str(tmp_path / "told")
    assert in_turns(job, [(0, file), (3, file)], seconds=0.0) == [(0, file), (3, file)]
    assert not Path(file).exists()


def lacks(file: str, wait: Callable[[], None]) -> None:
    wait()
    Path(file).write_text("had its turn")
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def test_want_of_memory_beside_others_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes a row for it; a process of its own is asked, which has the environment."""
    file = str(tmp_path / "told")
    assert in_turns(lacks, [(file,)], timed=False) == [(file,)]
    monkeypatch.setenv(BESIDE, str(tmp_path / "nobody"))
    assert in_turns(lacks, [(file,)], timed=False) == []
    assert Path(file).read_text() == "had its turn"

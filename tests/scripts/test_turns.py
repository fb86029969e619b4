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


def test_one_has_its_turn_at_a_time_and_deaths_are_told(tmp_path: Path) -> None:
    file = str(tmp_path / "told")
    lost = in_turns(job, [(n, file) for n in range(5)])
    assert lost == [(1, file), (2, file)]
    told = Path(file).read_text().splitlines()
    order = [line.split()[0] for line in told[::2]]  # as they were ready
    assert sorted(order) == ["0", "3", "4"]
    assert told == [f"{n} {what}" for n in order for what in ("begins", "ends")]


def test_nobody_has_a_turn_when_the_time_is_up(tmp_path: Path) -> None:
    file = str(tmp_path / "told")
    assert in_turns(job, [(0, file), (3, file)], seconds=0.0) == [(0, file), (3, file)]
    assert not Path(file).exists()


def beside(number: int, folder: str, wait: Callable[[], None]) -> None:
    """0 has its turn while 1 gets ready, which leaves traces; 0 says how many it saw."""
    trace, ended = Path(folder) / "trace", Path(folder) / "ended"
    if number == 0:
        while not trace.exists():
            time.sleep(0.01)
        wait()
        before = trace.stat().st_size
        time.sleep(0.3)
        ended.write_text(f"{trace.stat().st_size - before} more")
        return
    while not ended.exists():
        with trace.open("a") as file:
            file.write("x")
    wait()


def test_others_stop_getting_ready_while_one_has_its_turn(tmp_path: Path) -> None:
    assert in_turns(beside, [(n, str(tmp_path)) for n in range(2)]) == []
    assert (tmp_path / "ended").read_text() == "0 more"


def first(number: int, folder: str, wait: Callable[[], None]) -> None:
    """0 is ready when 2 has ended, or at once; each tells when it begins and has its turn."""
    folder_, file = Path(folder), Path(folder) / "told"
    with file.open("a") as lines:
        lines.write(f"{number} begins\n")
    while number == 0 and (folder_ / "slow").exists() and not (folder_ / "2").exists():
        time.sleep(0.01)
    wait()
    with file.open("a") as lines:
        lines.write(f"{number} has its turn\n")
    (folder_ / str(number)).touch()


@pytest.mark.parametrize("slow", [False, True])
def test_whoever_is_ready_goes_on_and_makes_room_for_the_next(tmp_path: Path, slow: bool) -> None:
    if slow:
        (tmp_path / "slow").touch()
    assert in_turns(first, [(n, str(tmp_path)) for n in range(3)], together=1 + slow) == []
    told = (tmp_path / "told").read_text().splitlines()
    turns = [line for line in told if line.endswith("turn")]
    order = [1, 2, 0] if slow else [0, 1, 2]
    assert turns == [f"{n} has its turn" for n in order]
    assert told.index("2 begins") > told.index(f"{1 if slow else 0} has its turn")


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

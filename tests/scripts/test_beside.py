"""Commands beside each other: whoever measures is alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from beside import run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

#: more seconds than a busy machine lets a process wait for a core
LONG_S = 60

#: counts without an end to it until the other command has measured
COUNTS = """
import pathlib, subprocess, sys, time
me = pathlib.Path(sys.argv[1])
if len(sys.argv) == 3:  # a process of a process is stopped, too
    sys.exit(subprocess.call([sys.executable, __file__, sys.argv[1]]))
for n in range(10**6):
    me.write_text(str(n))
    time.sleep(0.002)
    if (me.parent / "measured").exists():
        break
"""

#: asks for the machine, and looks at what the other does while it has it
MEASURES = f"""
import pathlib, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from turns import alone
other = pathlib.Path(sys.argv[1])
while not other.exists():
    time.sleep(0.01)
def moves(seconds):
    before, ends = other.read_text(), time.monotonic() + seconds
    while other.read_text() == before:
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True
found = [moves({LONG_S})]
with alone():
    found.append(moves(0.3))
found.append(moves({LONG_S}))
(other.parent / "found").write_text(str(found))
(other.parent / "measured").touch()
"""


def test_others_are_stopped_while_one_measures(tmp_path: Path) -> None:
    for name, source in (("counts", COUNTS), ("measures", MEASURES)):
        (tmp_path / f"{name}.py").write_text(source)
    python, other = sys.executable, tmp_path / "counter"
    commands = run(
        [
            f"{python} {tmp_path}/counts.py {other} child",
            f"{python} {tmp_path}/measures.py {other}",
        ],
        tmp_path / "logs",
        0.1,
    )
    assert [command.process.returncode for command in commands] == [0, 0]
    assert (tmp_path / "found").read_text() == "[True, False, True]"


def test_one_that_dies_while_it_measures_hands_the_machine_back(tmp_path: Path) -> None:
    source = f"""
import os, sys
sys.path.insert(0, {str(SCRIPTS)!r})
from turns import alone
with alone():
    if sys.argv[1] == "dies":
        os._exit(3)
    print("measured")
"""
    (tmp_path / "job.py").write_text(source)
    words = ("dies", "lives", "dies", "lives")
    commands = run([f"{sys.executable} {tmp_path}/job.py {w}" for w in words], tmp_path / "logs", 0)
    assert [command.process.returncode for command in commands] == [3, 0, 3, 0]
    assert [c.log.read_text() for c in commands[1::2]] == ["measured\n"] * 2


def test_what_still_runs_when_the_time_is_up_is_ended(tmp_path: Path) -> None:
    (command,) = run([f"{sys.executable} -c 'import time; time.sleep(60)'"], tmp_path, 0, 0.2)
    assert command.seconds is None
    assert command.process.returncode != 0


def test_a_signal_ends_everything(tmp_path: Path) -> None:
    """Also what was stopped because another one measured."""
    waits = f"""
import pathlib, time
pathlib.Path({str(tmp_path / "waits")!r}).touch()
time.sleep(600)
"""
    measures = f"""
import pathlib, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from turns import alone
while not pathlib.Path({str(tmp_path / "waits")!r}).exists():  # a stopped one would never begin
    time.sleep(0.01)
with alone():
    pathlib.Path({str(tmp_path / "measures")!r}).touch()
    time.sleep(600)
"""
    for name, source in (("one", waits), ("two", measures)):
        (tmp_path / f"{name}.py").write_text(source)
    commands = [f"{sys.executable} {tmp_path}/{name}.py" for name in ("one", "two")]
    beside = subprocess.Popen([sys.executable, SCRIPTS / "beside.py", *commands], cwd=tmp_path)
    ends = time.monotonic() + LONG_S
    while not (tmp_path / "measures").exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    below = psutil.Process(beside.pid).children(recursive=True)
    assert len(below) >= 2
    beside.send_signal(signal.SIGTERM)
    assert beside.wait(LONG_S) != 0
    _, left = psutil.wait_procs(below, timeout=LONG_S)
    assert left == []


def test_a_forked_process_does_not_keep_the_machine(tmp_path: Path) -> None:
    """It lives until everything else has ended, which does not wait for it."""
    source = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from turns import alone
with alone():
    if os.fork() == 0:
        ends = time.monotonic() + 10 * {LONG_S}
        while not pathlib.Path({str(tmp_path / "over")!r}).exists() and time.monotonic() < ends:
            time.sleep(0.01)
        pathlib.Path({str(tmp_path / "ended")!r}).touch()
        os._exit(0)
pathlib.Path({str(tmp_path / "measured")!r}).touch()
os._exit(0)
"""
    waits = f"""
import pathlib, time
while not pathlib.Path({str(tmp_path / "measured")!r}).exists():
    time.sleep(0.01)
"""
    for name, text in (("job", source), ("waits", waits)):
        (tmp_path / f"{name}.py").write_text(text)
    both = [f"{sys.executable} {tmp_path}/{name}.py" for name in ("job", "waits")]
    try:
        commands = run(both, tmp_path / "logs", 0)
        assert not (tmp_path / "ended").exists()
    finally:
        (tmp_path / "over").touch()
    assert [command.process.returncode for command in commands] == [0, 0]

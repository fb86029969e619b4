"""Jobs that get ready at the same time and are measured one after the other, each in a process.

Most of a benchmark's time goes to starting Python and to compiling, which is no business of the
clock, and a process of its own keeps what a peer does to its card from the others. While one is
measured the others are stopped.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pausing import Tree

#: what a job does when it is ready: it returns when the card is its own
Wait = Callable[[], None]
#: environment variable with the socket of `beside.py`, which started this program beside others
BESIDE = "FLASHBIAS_BESIDE"
#: and with the folder of what Inductor compiles
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
#: seconds between looks at who is ready
LOOK_S = 0.05
#: seconds after others are stopped
SETTLE_S = 0.3


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Measurements in here share the machine with no other program that `beside.py` started.

    Raises:
        RuntimeError: it gives the machine to nobody any more.
    """
    address = os.environ.get(BESIDE)
    if address is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as asked:  # closed when this process dies, too
        asked.connect(address)
        if asked.recv(1) != b"1":
            raise RuntimeError("beside.py, which had started this, has ended")
        try:
            yield
        finally:  # a forked process has the socket, too, and closing it here would say nothing
            asked.shutdown(socket.SHUT_RDWR)


def _run(job: Callable[..., None], arguments: tuple[Any, ...], ready: Any, turn: Any) -> None:
    def wait() -> None:
        ready.set()
        turn.wait()

    carry_out(job, arguments, wait)


def carry_out(job: Callable[..., None], arguments: tuple[Any, ...], wait: Wait) -> None:
    """Call a job. That memory lacked which others may hold is printed, and no death of a process.

    Whatever it had to write is then missing, and is measured by another run.
    """
    from failures import lacked_beside_others, no_row  # with torch, which `beside.py` needs not

    try:
        job(*arguments, wait)
    except Exception as problem:
        if not lacked_beside_others(problem):
            raise
        print(no_row(job.__name__, problem), flush=True)


@contextlib.contextmanager
def _sharing_cores(jobs: int, folder: Path) -> Iterator[None]:
    """Several compile: none that is started here thinks that the machine's cores are its own.

    Inductor's files are a job's own: one that is stopped may hold a lock of them.
    """
    wanted = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    changed = {**wanted, INDUCTOR: str(folder)} if jobs > 1 else {}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class _Waiting:
    """A process that is to have a turn."""

    process: Any
    ready: Any
    turn: Any

    @functools.cached_property
    def tree(self) -> Tree:
        return Tree(self.process.pid)


def in_turns(
    job: Callable[..., None],
    calls: Sequence[tuple[Any, ...]],
    *,
    together: int | None = None,
    seconds: float | None = None,
    timed: bool = True,
) -> list[tuple[Any, ...]]:
    """Call `job(*arguments, wait)` for all `calls`, each in a process, several at the same time.

    What a job does before `wait()` may happen beside the others; what it does afterwards it does
    alone: the first of `calls` that is ready has its turn.

    Args:
        job: a function of a module; it must call `wait` once.
        calls: arguments, that pickle takes.
        together: so many processes at a time; None means all.
        seconds: after so long nobody gets a turn any more.
        timed: what jobs do in their turns must be `alone`.

    Returns:
        The calls that did not end well, in order: their process died, or never had its turn. One
        that lacked memory beside others is none of them, see `carry_out`.
    """
    ends = math.inf if seconds is None else time.monotonic() + seconds
    line, waiting, lost = list(enumerate(calls)), {}, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while line or waiting:
                late = time.monotonic() > ends
                while line and not late and len(waiting) < (together or len(calls)):
                    number, arguments = line.pop(0)
                    with _sharing_cores(len(calls), Path(folder) / str(number)):
                        waiting[number] = _start(job, arguments)
                if late:
                    lost += [number for number, _ in line] + list(waiting)
                    break
                lost += _next(waiting, timed)
        finally:
            for one in waiting.values():
                one.tree.kill()
                one.process.join()
    return [calls[number] for number in sorted(lost)]


def _start(job: Callable[..., None], arguments: tuple[Any, ...]) -> _Waiting:
    context = multiprocessing.get_context("spawn")
    ready, turn = context.Event(), context.Event()
    process = context.Process(target=_run, args=(job, arguments, ready, turn))
    process.start()
    return _Waiting(process, ready, turn)


def _next(waiting: dict[int, _Waiting], timed: bool) -> list[int]:
    """Give the first that is ready its turn, and take out all that have ended.

    Returns:
        The numbers of those that were lost.
    """
    number = next((n for n, one in waiting.items() if one.ready.is_set()), None)
    if number is None:
        time.sleep(LOOK_S)
    else:
        others = [one.tree for n, one in waiting.items() if n != number]
        with _undisturbed(others) if timed else contextlib.nullcontext():
            waiting[number].turn.set()
            waiting[number].process.join()
    ended = [n for n, one in waiting.items() if not one.process.is_alive()]
    return [n for n in ended if waiting.pop(n).process.exitcode != 0]


@contextlib.contextmanager
def _undisturbed(others: Sequence[Tree]) -> Iterator[None]:
    """Neither by other programs nor by those that get ready beside it."""
    with alone():
        try:
            for tree in others:
                tree.stop()
            if others:
                time.sleep(SETTLE_S)  # what they have launched ends
            yield
        finally:
            for tree in others:
                tree.go()

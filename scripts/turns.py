"""Jobs that get ready at the same time and are measured one after the other, each in a process.

Most of a benchmark's time goes to starting Python and to compiling, which is no business of the
clock, and a process of its own keeps what a peer does to its card from the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: what a job does when it is ready: it returns when the card is its own
Wait = Callable[[], None]
#: environment variable with the socket of `beside.py`, which started this program beside others
BESIDE = "FLASHBIAS_BESIDE"


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
def _sharing_cores(jobs: int) -> Iterator[None]:
    """Several compile: none that is started here thinks that the machine's cores are its own."""
    names = ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS") if jobs > 1 else ()
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def in_turns(
    job: Callable[..., None],
    calls: Sequence[tuple[Any, ...]],
    *,
    seconds: float | None = None,
    timed: bool = True,
) -> list[tuple[Any, ...]]:
    """Call `job(*arguments, wait)` for all `calls`, each in a process, started at the same time.

    What a job does before `wait()` may happen beside the others; what it does afterwards it does
    alone, in the order of `calls`.

    Args:
        job: a function of a module; it must call `wait` once.
        calls: arguments, that pickle takes.
        seconds: after so long nobody gets a turn any more.
        timed: what jobs do in their turns must be `alone`.

    Returns:
        The calls that did not end well: their process died, or never had its turn. One that lacked
        memory beside others is none of them, see `carry_out`.
    """
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    waiting = []
    with _sharing_cores(len(calls)):
        for arguments in calls:
            ready, turn = context.Event(), context.Event()
            process = context.Process(target=_run, args=(job, arguments, ready, turn))
            process.start()
            waiting.append((arguments, process, ready, turn))
    for _, process, ready, _ in waiting:
        while process.is_alive() and not ready.wait(0.1):
            pass
    with alone() if timed else contextlib.nullcontext():
        return _one_by_one(waiting, started, seconds)


def _one_by_one(
    waiting: Sequence[tuple[tuple[Any, ...], Any, Any, Any]], started: float, seconds: float | None
) -> list[tuple[Any, ...]]:
    """Give turns, in order; returns the calls that were lost."""
    lost = []
    for arguments, process, _, turn in waiting:
        if seconds is not None and time.monotonic() - started > seconds:
            process.kill()
        else:
            turn.set()
        process.join()
        if process.exitcode != 0:
            lost.append(arguments)
    return lost

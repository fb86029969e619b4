"""Processes that run cases one after the other, watched from outside."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: seconds for imports and for the processes to meet
START_S = 120.0
#: characters of a log that are shown: where all threads are takes many, the innermost come first
_SAID = 40_000
#: what goes on to the processes
SHARED = ("backend", "device", "size", "repeats", "limit_s")


class Watched:
    """`count` processes of a script that share cases; every one is in a session of its own.

    The first of them writes what was found to a file, a line for each case. A case that takes too
    long, and a process that ends early, is told as a failed case; then all are to be killed.
    """

    def __init__(
        self, script: Path, kind: str, count: int, cases: list[str], options: argparse.Namespace
    ) -> None:
        self._room = tempfile.TemporaryDirectory()
        self._folder = Path(self._room.name)
        (self._folder / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, "-W", "ignore", str(script), "--kind", kind]
        command += ["--folder", str(self._folder)]
        for option in SHARED:
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        # multicast needs a service of the host that containers often lack; two cards need none
        environment = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        self._logs = [(self._folder / f"log-{rank}.txt").open("w") for rank in range(count)]
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
            for rank, log in enumerate(self._logs)
        ]
        self._read = 0
        self.usable = True

    def start(self, ends: float) -> dict[str, Any] | None:
        """None when all processes have met, or why they have not."""
        found = self._next(min(time.monotonic() + START_S, ends), "they did not meet")
        return None if "ready" in found else found

    def next(self, limit: float, ends: float) -> dict[str, Any]:
        """What was found in the next case."""
        until = time.monotonic() + limit
        late = f"not done after {limit:g} s" if until < ends else "not done when the time was up"
        return self._next(min(until, ends), late)

    def _next(self, until: float, late: str) -> dict[str, Any]:
        while True:
            dead = [p.poll() not in (None, 0) for p in self._processes]
            lines = self._lines()  # read after looking who lives: what was written last counts
            if len(lines) > self._read:
                self._read += 1
                found: dict[str, Any] = json.loads(lines[self._read - 1])
                return found
            if any(dead):
                self._tell_where()  # whoever waits for the dead
                return self._failed(self._reason(dead.index(True)))
            if all(p.poll() == 0 for p in self._processes):
                return self._failed("the processes ended before it was done")
            if time.monotonic() > until:
                self._tell_where()
                return self._failed(late)
            time.sleep(0.05)

    def _lines(self) -> list[str]:
        path = self._folder / "found.jsonl"
        # the last one may be half written
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def _tell_where(self) -> None:
        """Processes write into their logs where they are, which takes a moment."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)  # to nobody where it has ended
        time.sleep(0.5)

    def _failed(self, reason: str) -> dict[str, Any]:
        self.usable = False
        for log in sorted(self._folder.glob("log-*.txt")):
            said = log.read_text(errors="replace")[-_SAID:]
            print(f"--- {log.name}\n{said}", file=sys.stderr)
        return {"status": "failed", "reason": reason}

    def _reason(self, rank: int) -> str:
        told = self._folder / f"error-{rank}.txt"
        if told.exists():
            return f"process {rank}: {told.read_text()}"
        return f"process {rank} ended with {self._processes[rank].returncode}"

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.usable:  # all cases are done: they take leave of each other
            until = time.monotonic() + 10
            while any(p.poll() is None for p in self._processes) and time.monotonic() < until:
                time.sleep(0.05)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
        for log in self._logs:
            log.close()
        self._room.cleanup()

"""Several commands beside each other on one card; whoever measures has the machine alone.

python scripts/beside.py [--logs DIR] [--stop-s S] [--settle-s S] 'COMMAND' 'COMMAND' ...

Benchmarks spend most of their time starting and compiling. Each command gets a shell, cores and
card beside the others until a script among them measures (`turns.alone`): then the processes of all
other commands are stopped until it has done so. Commands that measure without asking are disturbed,
and disturb nobody who asks. Triton's and Inductor's caches are a command's own, since a stopped
process may hold a lock of them. Output goes to files; their ends are printed. Leaves with 1 if a
command failed, or had to be ended after --stop-s. Limits of time that a command has itself do not
wait while it is stopped: give it none, or long ones.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from pausing import Tree
from turns import BESIDE

#: seconds between looks at which commands have ended
LOOK_S = 0.05
#: lines of a command's output that are printed when all have ended
TOLD = 12


@dataclass
class Command:
    """A shell command that runs beside others.

    Attributes:
        text: what was asked for.
        process: its shell.
        tree: that process and what it has started.
        log: everything it printed.
        seconds: it took, or None while it runs.
        alone_s: of them it had the machine alone.
    """

    text: str
    process: subprocess.Popen[bytes]
    tree: Tree
    log: Path
    seconds: float | None = None
    alone_s: float = 0.0


def start(text: str, number: int, logs: Path, address: str) -> Command:
    """Start a command, with caches and a log of its own."""
    caches = {
        name: str(logs / "caches" / f"{number}-{name.lower()}")
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    log = logs / f"beside_{number}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            text, shell=True, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **caches, BESIDE: address},
        )  # fmt: skip
    return Command(text, process, Tree(process.pid), log)


def peer(connection: socket.socket) -> int:
    """The process at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


class Machine:
    """Whom the machine belongs to: nobody, or the one who has asked first."""

    def __init__(self, commands: list[Command], server: socket.socket, settle_s: float) -> None:
        self.commands, self.settle_s = commands, settle_s
        self.asked: deque[socket.socket] = deque()
        self.owner: socket.socket | None = None
        self.owns: Command | None = None
        self.since = 0.0
        self.watched = selectors.DefaultSelector()
        self.watched.register(server, selectors.EVENT_READ)
        self.server = server

    def look(self) -> None:
        """Take who asks, part with who has gone, and give the machine to the next."""
        for key, _ in self.watched.select(LOOK_S):
            if key.fileobj is self.server:
                connection, _ = self.server.accept()
                self.watched.register(connection, selectors.EVENT_READ)
                self.asked.append(connection)
            else:  # nobody sends anything, so this one has closed
                self._gone(key.fileobj)  # type: ignore[arg-type]
        if self.owner is None and self.asked:
            self._give(self.asked.popleft())

    def _gone(self, connection: socket.socket) -> None:
        self.watched.unregister(connection)
        connection.close()
        if connection is not self.owner:
            self.asked.remove(connection)
            return
        self.owner = None
        if self.owns is not None:
            self.owns.alone_s += time.monotonic() - self.since
        if not self.asked:
            for command in self.commands:
                command.tree.go()

    def _give(self, connection: socket.socket) -> None:
        pid = peer(connection)
        self.owns, self.since = None, time.monotonic()
        for command in self.commands:
            if pid in [process.pid for process in command.tree.processes()]:
                self.owns = command
                command.tree.go()
            else:
                command.tree.stop()
        time.sleep(self.settle_s)  # what stopped processes have launched ends
        self.owner = connection
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(b"1")


def run(texts: list[str], logs: Path, settle_s: float, stop_s: float = math.inf) -> list[Command]:
    """Run commands until all have ended, or until it is too late; returns them."""
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = str(Path(folder) / "machine")
        server.bind(address)
        server.listen()
        commands = [start(text, n, logs, address) for n, text in enumerate(texts)]
        machine = Machine(commands, server, settle_s)
        try:
            while any(command.seconds is None for command in commands):
                machine.look()
                if time.monotonic() - started > stop_s:
                    break
                for command in commands:
                    if command.seconds is None and command.process.poll() is not None:
                        command.seconds = time.monotonic() - started
        finally:
            for command in commands:
                command.tree.kill()
                command.process.wait()
    return commands


def main() -> int:
    """Run, and tell how each command ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    parser.add_argument("--logs", type=Path, default=Path("build/beside"))
    parser.add_argument("--stop-s", type=float, default=math.inf, help="end what still runs then")
    parser.add_argument("--settle-s", type=float, default=0.3, help="after others are stopped")
    options = parser.parse_args()
    ends_by_signal()
    return told(run(options.commands, options.logs, options.settle_s, options.stop_s))


def ends_by_signal() -> None:
    """Leave as by Ctrl-C when something ends this program: nobody else would let others go on."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def told(commands: list[Command]) -> int:
    """Print how each command ended; 1 if one failed, else 0."""
    for command in commands:
        lines = command.log.read_text(errors="replace").splitlines()
        ended = "ended" if command.seconds is None else f"{command.seconds:.0f} s"
        code = f"exit code {command.process.returncode}, {ended}, alone {command.alone_s:.0f} s"
        print(f"== {command.text}: {code}")
        print(*lines[-TOLD:], sep="\n")
    return int(any(command.process.returncode for command in commands))


if __name__ == "__main__":
    sys.exit(main())

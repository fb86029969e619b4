"""A process and all that it has started, stopped for a while."""

from __future__ import annotations

import contextlib

import psutil


class Tree:
    """A process with its descendants.

    Args:
        pid: of the process. What gets its number later is not taken for it.

    Attributes:
        stopped: those that `stop` has stopped.
    """

    def __init__(self, pid: int) -> None:
        self.root: psutil.Process | None = None
        self.stopped: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            self.root = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """Every one that still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.root is not None and self.root.is_running():
                return [self.root, *self.root.children(recursive=True)]
        return []

    def stop(self) -> None:
        """Until `go`; what is started meanwhile is found, because its parent stops, too."""
        while new := [p for p in self.processes() if p not in self.stopped]:
            for process in new:
                self.stopped.append(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()

    def go(self) -> None:
        """Go on after `stop`; what something else has stopped stays so."""
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.stopped.clear()

    def kill(self) -> None:
        """End all of them."""
        self.stop()  # nothing is started meanwhile
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

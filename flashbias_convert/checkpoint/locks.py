"""One process at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError

#: how long to wait for another process that gives files their names, in seconds
_PATIENCE, _PAUSE = 30, 0.01


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; it ends with the process, and leaves no file.

    Raises:
        CheckpointError: another process has held it for a long time.
    """
    try:
        import fcntl
    except ImportError:  # no locks on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(int(_PATIENCE / _PAUSE)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PAUSE)
            except OSError:  # a file system without locks
                break
        else:
            raise CheckpointError(f"another process has locked {folder} for {_PATIENCE} seconds")
        yield
    finally:
        os.close(descriptor)

"""A folder in the making that outlives an interruption, and what of it can be relied on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CheckpointError
from .publication import remove

logger = logging.getLogger(__name__)

_JOURNAL = "journal.jsonl"


class Partial:
    """The hidden folder ``.NAME.partial`` beside an output that is being written.

    It is kept if this process is killed or interrupted, and after an error if files were finished
    that the same job can use again. It is removed after any other end. One process at a time works
    in it.

    Args:
        final: the folder to be made.
        job: stands for everything that decides on the bytes of the output. What was left by
            another job is removed, with a warning.
        useless: errors after which the same job would not end otherwise, or not be the same.

    Attributes:
        out: where to write what will be called `final`.
        kept: the folder, once it is known that it stays after an error.
    """

    def __init__(
        self, final: Path, job: str, useless: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._folder = final.with_name(f".{final.name}.partial")
        self._job, self._useless = job, useless
        self.kept: Path | None = None
        self._lock: int | None = None
        self.out = self._folder / "out"
        self._journal = self._folder / _JOURNAL

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        self._lock = _lock(self._folder)
        try:
            if self._read()[:1] != [{"job": self._job}]:
                self._start_anew()
            self.out.mkdir(exist_ok=True)
        except BaseException:
            if not self.finished():
                remove(self._folder)
            self._unlock()
            raise
        return self

    def _start_anew(self) -> None:
        if self.out.is_dir() and any(self.out.iterdir()):
            logger.warning(
                "%s is of another conversion (its input, options or versions differ): it cannot "
                "be used, and its %d finished shards are deleted",
                self._folder,
                len(self.finished()),
            )
        remove(self.out)
        self._journal.unlink(missing_ok=True)
        self._append({"job": self._job})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._can_go_on(error):
            self.kept = self._folder
        else:
            remove(self._folder)
        self._unlock()

    def _can_go_on(self, error: BaseException) -> bool:
        """Whether the same call would find something to go on from."""
        if isinstance(error, KeyboardInterrupt):
            return True
        return bool(self.finished()) and not isinstance(error, self._useless)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finished(self) -> frozenset[str]:
        """Names of the files that an earlier run says it has finished; to be verified."""
        return frozenset(str(e["file"]) for e in self._read()[1:] if "file" in e)

    def finish(self, name: str) -> None:
        """Note that a file is durable and was verified."""
        self._append({"file": name})

    def _read(self) -> list[dict[str, object]]:
        """The entries of the journal, up to the first that is damaged."""
        entries = []
        try:
            lines = self._journal.read_bytes().splitlines()
            for line in lines:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    break
                entries.append(entry)
        except (OSError, ValueError):
            pass
        return entries

    def _append(self, entry: dict[str, str]) -> None:
        with self._journal.open("ab") as file:
            # on a line of its own, whatever a killed writer left
            file.write(b"\n" * (file.tell() > 0) + json.dumps(entry).encode())
            file.flush()
            os.fsync(file.fileno())


def _lock(folder: Path) -> int | None:
    """Hold the lock of a folder until the descriptor is closed.

    Raises:
        CheckpointError: another process holds it, or has finished meanwhile.
    """
    try:
        import fcntl
    except ImportError:  # no locks on this system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise BlockingIOError
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"another process is writing {folder}", "wait for it, or choose another --output"
        ) from error
    except OSError:  # a file system without locks
        pass
    return descriptor

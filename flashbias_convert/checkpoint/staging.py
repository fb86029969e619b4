"""Files appear under their final name complete, or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CheckpointError
from .locks import alone_in
from .publication import Publication, remove, require_absent, require_no_folder

__all__ = ["Staging", "require_absent", "require_no_folder"]


class Staging:
    """Collects files under temporary names beside their final ones; `commit` renames them.

    Leaving the context without `commit` removes everything, whatever happened.

    Args:
        force: replace files that exist.
    """

    def __init__(self, force: bool = False) -> None:
        self._force = force
        self._files: list[tuple[Path, Path]] = []

    def add(self, final: Path) -> Path:
        """The temporary name under which to write what will be called `final`."""
        require_absent(final, self._force)
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
        self._files.append((temporary, final))
        return temporary

    def adopt(self, temporary: Path, final: Path) -> None:
        """Take what was written elsewhere in the same file system; it will be called `final`."""
        require_absent(final, self._force)
        self._files.append((temporary, final))

    def commit(self) -> None:
        """Make the files durable and give them their names.

        A file that is replaced has its name all the time, a folder all but a moment. What comes
        after the first file belongs to it: it is never seen beside another one, whenever this
        process ends. Processes that commit in the same folder wait for each other.

        After an exception none of the files has its name, and what they would have replaced is
        back.

        Raises:
            UsageError: a file exists and may not be replaced, or a folder is in its place.
            OSError: the file system refuses.
        """
        for temporary, final in self._files:
            _sync_tree(temporary, final)
        steps = [Publication(temporary, final) for temporary, final in self._files]
        folders = sorted({final.parent for _, final in self._files})
        with ExitStack() as locks:
            for folder in folders:
                locks.enter_context(alone_in(folder))
            self._publish(steps, folders)
        for step in steps:
            remove(step.old)

    def _publish(self, steps: list[Publication], folders: list[Path]) -> None:
        try:
            if self._force:
                for step in steps[1:]:
                    step.set_aside()
            for step in steps:
                step.do(self._force)
            for folder in folders:
                _sync(folder)
        except BaseException:
            for step in reversed(steps):
                step.undo()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for temporary, _ in self._files:
            remove(temporary)


def _sync_tree(path: Path, final: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{final} vanished while it was written")
    for child in path.iterdir() if path.is_dir() else ():
        _sync(child)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files appear under their final name complete, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CheckpointError, UsageError


def require_absent(path: Path, force: bool) -> None:
    """Raise UsageError unless `path` can be created: its folder is there, and nothing is in it.

    Args:
        path: what will be written.
        force: an existing file may be replaced. Folders are the caller's to check.
    """
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", "choose another --output, or replace it with --force")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"no permission to write in {path.parent}", "choose another --output")


def require_no_folder(path: Path) -> None:
    """Raise UsageError if a folder is where a file is to be written."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder, so no file can be written there", "choose another --output"
        )


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

    def commit(self) -> None:
        """Make the files durable and give them their names.

        After an exception none of them is left, and what they would have replaced is back.

        Raises:
            UsageError: a file exists and may not be replaced, or a folder is in its place.
            OSError: the file system refuses.
        """
        for temporary, final in self._files:
            _sync_tree(temporary, final)
        steps: list[_Publication] = []
        try:
            for temporary, final in self._files:
                steps.append(_Publication(temporary, final))
                steps[-1].do(self._force)
            for folder in {final.parent for _, final in self._files}:
                _sync(folder)
        except BaseException:
            for step in reversed(steps):
                step.undo()
            raise
        for step in steps:
            _remove(step.old)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for temporary, _ in self._files:
            _remove(temporary)


class _Publication:
    """Gives one file or folder its name, and takes that back.

    Attributes:
        old: where what is replaced waits until it can be deleted.
    """

    def __init__(self, temporary: Path, final: Path) -> None:
        self._temporary, self._final = temporary, final
        self.old = final.with_name(f".{final.name}.{secrets.token_hex(4)}.old")
        self._done = False

    def do(self, force: bool) -> None:
        is_folder = self._temporary.is_dir()
        if force and os.path.lexists(self._final):
            if not is_folder:
                require_no_folder(self._final)
            os.rename(self._final, self.old)
        if force or is_folder:
            os.rename(self._temporary, self._final)
        else:
            _publish_new(self._temporary, self._final)
        self._done = True

    def undo(self) -> None:
        if self._done:
            _remove(self._final)
        if os.path.lexists(self.old):
            os.rename(self.old, self._final)


def _publish_new(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)  # unlike a rename, fails if somebody was faster
    except FileExistsError as error:
        raise UsageError(f"{final} exists", "replace it with --force") from error
    except OSError:  # a file system without hard links
        require_absent(final, force=False)
        os.rename(temporary, final)


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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

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
        force: an existing file may be replaced. A folder may not, see `Staging.commit_folder`.
    """
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", "choose another --output, or replace it with --force")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"no permission to write in {path.parent}", "choose another --output")


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
        """Make the files durable and give them their names; all of them, or none is left."""
        for temporary, _ in self._files:
            _sync_tree(temporary)
        published: list[Path] = []
        try:
            for temporary, final in self._files:
                _publish(temporary, final, self._force)
                published.append(final)
        except BaseException:
            for final in published:
                _remove(final)
            raise
        for folder in {final.parent for _, final in self._files}:
            _sync(folder)

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


def _publish(temporary: Path, final: Path, force: bool) -> None:
    if temporary.is_dir():
        _publish_folder(temporary, final)
    elif force:
        os.replace(temporary, final)
    else:
        _publish_new(temporary, final)


def _publish_new(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)  # unlike a rename, fails if somebody was faster
    except FileExistsError as error:
        raise UsageError(f"{final} exists", "replace it with --force") from error
    except OSError:  # a file system without hard links
        require_absent(final, force=False)
        os.rename(temporary, final)


def _publish_folder(temporary: Path, final: Path) -> None:
    if not final.exists():
        os.rename(temporary, final)
        return
    old = final.with_name(f".{final.name}.{secrets.token_hex(4)}.old")
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} vanished while it was written")
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
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

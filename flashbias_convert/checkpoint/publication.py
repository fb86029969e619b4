"""Giving a finished file or folder its name, and taking that back."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ..errors import UsageError


def require_absent(path: Path, force: bool) -> None:
    """Raise UsageError unless `path` can be created: its folder is there, and nothing is in it.

    Args:
        path: what will be written.
        force: an existing file may be replaced. Folders are the caller's to check.
    """
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist")
    if os.path.lexists(path) and not force:
        raise _exists(path)
    options = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    if not os.access(path.parent, os.W_OK | os.X_OK, **options):
        raise UsageError(f"no permission to write in {path.parent}", "choose another --output")


def require_no_folder(path: Path) -> None:
    """Raise UsageError if a folder is where a file is to be written."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder, so no file can be written there", "choose another --output"
        )


class Publication:
    """Gives one file or folder its name, and takes that back.

    Attributes:
        old: where what is replaced waits until it can be deleted.
    """

    def __init__(self, temporary: Path, final: Path) -> None:
        self._temporary, self._final = temporary, final
        self.old = final.with_name(f".{final.name}.{secrets.token_hex(4)}.old")
        self._is_folder = temporary.is_dir()
        self._own = _identity(temporary)

    def set_aside(self) -> None:
        """Take the name from whatever has it."""
        if os.path.lexists(self._final):
            if not self._is_folder:
                require_no_folder(self._final)
            os.rename(self._final, self.old)

    def do(self, force: bool) -> None:
        """Give the file its name; with `force` in the place of whatever has it."""
        if self._is_folder:
            self._do_folder(force)
        elif force:
            if os.path.lexists(self._final):
                require_no_folder(self._final)
                self._keep_old()
            os.replace(self._temporary, self._final)
        else:
            _publish_new(self._temporary, self._final)

    def _do_folder(self, force: bool) -> None:
        if force:
            self.set_aside()
        elif os.path.lexists(self._final):  # a rename would replace an empty folder
            raise _exists(self._final)
        os.rename(self._temporary, self._final)

    def _keep_old(self) -> None:
        try:
            os.link(self._final, self.old, follow_symlinks=False)
        except (OSError, NotImplementedError):  # a file system without hard links
            os.rename(self._final, self.old)

    def undo(self) -> None:
        """Remove what has the name by `do`, and put back what had it before."""
        # by its identity: an interrupt may come between a rename and any note of it
        published = os.path.lexists(self._final) and _identity(self._final) == self._own
        replaced = os.path.lexists(self.old)
        if published and self._is_folder:
            self._withdraw()
        elif published and not replaced:
            remove(self._final)
        if replaced:
            os.replace(self.old, self._final)
            remove(self.old)  # a rename between two names of one file does nothing

    def _withdraw(self) -> None:
        """Give a folder its temporary name again: whether it is kept, its maker decides."""
        try:
            os.rename(self._final, self._temporary)
        except OSError:
            remove(self._final)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _exists(final: Path) -> UsageError:
    return UsageError(
        f"{final} exists",
        "choose another output, or replace it with --force (force=True in Python)",
    )


def _publish_new(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)  # unlike a rename, fails if somebody was faster
    except FileExistsError as error:
        raise _exists(final) from error
    except OSError:  # a file system without hard links
        require_absent(final, force=False)
        os.rename(temporary, final)


def remove(path: Path) -> None:
    """Remove a file, a link, a folder with all that is in it, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Disks that are full or read-only, folders without permission: told, and nothing is kept."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashbias_convert import load_model
from flashbias_convert.errors import CheckpointError, FlashBiasError, UsageError

from . import tiny
from .amount import amount
from .conftest import Count
from .judge import refused, snapshot

ARCH = f"timm:{tiny.NAME}"
IS_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tiny.Good:
    return tiny.Good.make(tmp_path_factory.mktemp("good"))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory; skips where none can be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if not IS_ROOT or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, whom no permission binds."""
    if not IS_ROOT:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def written_or_nothing(source: Path, folder: Path) -> str:
    """Convert into a folder, and look at what is there afterwards."""
    before = snapshot(folder)
    output = folder / ("out.safetensors" if source.is_file() else "out")
    try:
        done = tiny.convert(source, output, arch=ARCH if source.is_file() else None)
    except FlashBiasError as error:
        assert snapshot(folder) == before, "something was kept"
        assert "No space left" in str(error) or "File too large" in str(error)
        return refused(error)
    assert done.output == output
    load_model(output)
    return "written"


@pytest.mark.parametrize("which", ["bare", "folder"])
def test_a_disk_of_any_size(which: str, good: tiny.Good, tmp_path: Path, count: Count) -> None:
    """From no room at all to enough: in between, the weights fit and the sidecar does not."""
    steps = amount(4, 24)
    ended = set()
    for step in range(steps):
        kilobytes = 4 + step * 128 // (steps - 1)
        with mounted(tmp_path / "disk", f"size={kilobytes}k") as disk:
            outcome = written_or_nothing(getattr(good, which), disk)
        ended.add(outcome)
        count("full disks", outcome)
    assert ended == {"written", "refused: CheckpointError"}, "some must fit and some must not"


def test_a_disk_without_room_for_another_name(
    good: tiny.Good, tmp_path: Path, count: Count
) -> None:
    for inodes in (1, 2):
        with mounted(tmp_path / "disk", f"size=1m,nr_inodes={inodes}") as disk:
            assert written_or_nothing(good.bare, disk) == "refused: CheckpointError"
        count("disks without room for a name", "refused: CheckpointError")


def test_a_limit_on_the_size_of_files(good: tiny.Good, tmp_path: Path, count: Count) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        outcomes = [written_or_nothing(s, tmp_path) for s in (good.bare, good.folder)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcomes == ["refused: CheckpointError"] * 2
    count("limits on the size of files", outcomes[0], 2)


def test_a_disk_that_is_read_only(good: tiny.Good, tmp_path: Path, count: Count) -> None:
    with mounted(tmp_path / "disk", "ro,size=1m") as disk:
        for source in (good.bare, good.folder):
            with pytest.raises(UsageError, match="no permission to write in"):
                tiny.convert(source, disk / ("x.safetensors" if source.is_file() else "x"))
            count("read-only disks", "refused: UsageError")


def test_folders_and_files_without_permission(
    good: tiny.Good, tmp_path: Path, count: Count
) -> None:
    """The folders above are the test runner's own, so they are opened to others for a while."""
    source = tmp_path / "x.safetensors"
    source.write_bytes(good.bare.read_bytes())
    closed = tmp_path / "closed"
    closed.mkdir()
    above = [tmp_path, *list(tmp_path.parents)[:4]]
    modes = [path.stat().st_mode for path in above]
    try:
        for path in above:
            path.chmod(path.stat().st_mode | 0o011)
        tmp_path.chmod(0o555)
        with as_nobody(), pytest.raises(UsageError, match="no permission to write in"):
            tiny.convert(source, arch=ARCH)
        source.chmod(0o000)
        with as_nobody(), pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            tiny.convert(source, arch=ARCH, dry_run=True)
        closed.chmod(0o000)
        with as_nobody(), pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            load_model(closed)
    finally:
        for path, mode in zip(above, modes, strict=True):
            path.chmod(mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["closed", "x.safetensors"]
    count("no permission", "refused", 3)

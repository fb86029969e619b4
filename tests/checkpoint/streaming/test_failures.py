"""A conversion of shards that fails keeps what can be used again, and the input as it was."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flashbias_convert import load_model
from flashbias_convert.checkpoint import staging, streaming
from flashbias_convert.checkpoint.partial import Partial
from flashbias_convert.errors import CheckpointError, UsageError, VerificationError
from flashbias_convert.options import DecomposeOptions

from ..models import tiny_weights
from ..sharded import contents, write_shards
from .shards import TERMS, convert, hidden, partial, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_other_shapes_are_an_error(tmp_path: Path) -> None:
    wrong = {**tiny_weights(), "norm.bias": torch.zeros(3)}
    source = write_shards(tmp_path / "m", wrong, "safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.bias has shape"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_error_before_a_shard_is_finished_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = swin(tmp_path / "m")
    with pytest.raises(CheckpointError, match="nothing was kept: broken"):
        convert(
            source, tmp_path / "out", copying=lambda *_: (_ for _ in ()).throw(OSError("broken"))
        )
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_check_that_fails_keeps_nothing(tmp_path: Path) -> None:
    source, seen = swin(tmp_path / "m"), []

    def check(written: Path) -> None:
        seen.append(load_model(written))
        raise VerificationError("no")

    with pytest.raises(VerificationError):
        convert(source, tmp_path / "out", check=check)
    assert len(seen) == 1 and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_is_seen_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    source = swin(tmp_path / "m")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(streaming.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"0\.0 GB are free"):
        convert(source, tmp_path / "out")
    assert copies == [] and [p.name for p in tmp_path.iterdir()] == ["m"]


def stopped(tmp_path: Path, error: BaseException, at: str = "00003-of") -> tuple[Path, Path]:
    """A source, and an output of which two shards are there when an error comes."""
    source, output = swin(tmp_path / "m"), tmp_path / "out"

    def copying(done: int, total: int, name: str) -> None:
        if at in name:
            raise error

    with pytest.raises((type(error), CheckpointError)) as caught:
        convert(source, output, copying=copying)
    assert not output.exists() and partial(output).is_dir()
    told = f"No space left; {partial(output)} keeps the finished shards: the same call goes on"
    assert not isinstance(error, OSError) or told in str(caught.value)
    return source, output


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left"), MemoryError(), SystemExit(143), ValueError("a bug"),
        SafetensorError("unreadable"), CheckpointError("the written file does not read back: x"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_finished_shards_outlive_an_error(
    tmp_path: Path, error: BaseException, copies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    source, output = stopped(tmp_path, error)
    said = not isinstance(error, OSError | SafetensorError)
    assert ("keeps what was copied: the same call goes on from it" in caplog.text) == said
    expected = contents(convert(source, tmp_path / "at once"))
    copies.clear()
    convert(source, output)
    assert copies == ["model-00003-of-00003.safetensors"]
    assert contents(output) == expected and hidden(tmp_path) == []


def test_finished_shards_outlive_a_disk_that_is_full_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    source, output = stopped(tmp_path, MemoryError())
    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as full:
        full.setattr(streaming.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match=r"are free.* keeps the finished shards"):
            convert(source, output)
    copies.clear()
    convert(source, output)
    assert copies == ["model-00003-of-00003.safetensors"] and hidden(tmp_path) == []


def test_finished_shards_outlive_an_error_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    source, output, real = swin(tmp_path / "m"), tmp_path / "out", staging._sync

    def refuse(path: Path) -> None:
        if output.exists():  # the folder has its name by now
            raise OSError(errno.EIO, "no such luck")
        real(path)

    with monkeypatch.context() as broken:
        broken.setattr(staging, "_sync", refuse)
        with pytest.raises(CheckpointError, match=r"no such luck; .* keeps the finished shards"):
            convert(source, output)
    assert not output.exists() and len(copies) == 3
    convert(source, output)
    assert len(copies) == 3 and hidden(tmp_path) == []


@pytest.mark.parametrize("needs", ["terms", "headers", "configs"])
def test_everything_that_is_written_needs_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, copies: list[str]
) -> None:
    source = swin(tmp_path / "m")
    (source / "tokenizer.json").write_bytes(bytes(5000))
    written = {p.name: p.stat().st_size for p in convert(source, tmp_path / "whole").iterdir()}
    total = sum(size for name, size in written.items() if not name.endswith(".index.json"))
    lacks = {
        "terms": written[TERMS], "configs": written["tokenizer.json"],
        "headers": total - sum(t.nbytes for p in source.glob("*.safetensors")
                               for t in load_file(p).values()) - written[TERMS] - 5000,
    }[needs]  # fmt: skip
    copies.clear()
    usage: Any = type("Usage", (), {"free": total - lacks // 2})
    monkeypatch.setattr(streaming.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="are free"):
        convert(source, tmp_path / "out")
    assert copies == [] and not partial(tmp_path / "out").exists()
    usage.free = total
    convert(source, tmp_path / "out")


def test_links_need_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = swin(tmp_path / "m")
    linked = convert(source, tmp_path / "linked", link=True)
    written = sum(p.stat().st_size for p in linked.iterdir() if p.stat().st_nlink == 1)
    usage = type("Usage", (), {"free": written})
    monkeypatch.setattr(streaming.shutil, "disk_usage", lambda _: usage)
    convert(source, tmp_path / "out", link=True)
    with pytest.raises(CheckpointError, match="are free"):
        convert(source, tmp_path / "copied")


def test_what_another_conversion_left_is_deleted_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = stopped(tmp_path, MemoryError())
    caplog.clear()
    convert(source, output, options=DecomposeOptions(energy=0.9))
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith(f"{partial(output)} is of another conversion")
    assert "its 2 finished shards are deleted" in said
    caplog.clear()
    convert(source, output, force=True)
    assert caplog.text == ""


def test_a_folder_that_cannot_be_begun_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space"), Partial(tmp_path / "out", "job"):
            pass
    assert hidden(tmp_path) == []
    with Partial(tmp_path / "out", "job"):
        assert partial(tmp_path / "out").is_dir()
    assert hidden(tmp_path) == []


def test_an_input_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = swin(tmp_path / "m")
    second, third = sorted(source.glob("*.safetensors"))[1:]

    def copying(done: int, total: int, name: str) -> None:
        if "00001" in name:
            third.write_bytes(second.read_bytes())

    with pytest.raises(CheckpointError, match="has changed while it was converted"):
        convert(source, tmp_path / "out", copying=copying)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_two_processes_do_not_write_the_same_output(tmp_path: Path) -> None:
    source = swin(tmp_path / "m")
    with Partial(tmp_path / "out", "another job"):
        with pytest.raises(CheckpointError, match="another process is writing"):
            convert(source, tmp_path / "out")
        assert partial(tmp_path / "out").is_dir()


def test_replacing(tmp_path: Path) -> None:
    source = swin(tmp_path / "m")
    output = convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match="exists"):
        convert(source, output)
    (output / "more.txt").touch()
    convert(source, output, force=True)
    assert not (output / "more.txt").exists()
    with pytest.raises(UsageError, match="would change the input"):
        convert(source, source, force=True)

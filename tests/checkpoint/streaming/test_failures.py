"""A conversion of shards that fails keeps nothing, and the input stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashbias_convert import load_model
from flashbias_convert.checkpoint import streaming
from flashbias_convert.checkpoint.partial import Partial
from flashbias_convert.errors import CheckpointError, UsageError, VerificationError

from ..models import tiny_weights
from ..sharded import write_shards
from .shards import convert, partial, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_other_shapes_are_an_error(tmp_path: Path) -> None:
    wrong = {**tiny_weights(), "norm.bias": torch.zeros(3)}
    source = write_shards(tmp_path / "m", wrong, "safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.bias has shape"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_error_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

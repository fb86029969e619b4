"""Shards that stay as they are become links to the input, which nothing writes to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.errors import UsageError

from ..models import images, tiny_weights, write_tiny
from ..sharded import contents
from .shards import TINY, convert, hidden, partial, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_shards_that_stay_are_linked(tmp_path: Path, copies: list[str]) -> None:
    source = swin(tmp_path / "m")
    before = contents(source)
    output = convert(source, tmp_path / "out", link=True)
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert copies == [] and all((output / n).samefile(source / n) for n in names)
    whole = convert(source, tmp_path / "whole")
    found, expected = read_checkpoint(output), read_checkpoint(whole)
    linked = {key: text for key, text in found.metadata.items() if key.endswith(".linked")}
    assert list(map(json.loads, linked.values())) == [names]
    assert found.metadata == {**expected.metadata, **linked}
    with torch.no_grad():
        assert torch.equal(load_model(output)(images()), load_model(whole)(images()))
    back = load_file(restore_checkpoint(output, tmp_path / "back").output / "model.safetensors")
    assert all(torch.equal(back[k], t) for k, t in tiny_weights(torch.float16).items())
    # neither a second conversion, of this output or in its place, nor its end touches the input
    convert(source, output, force=True)
    assert not any((output / n).samefile(source / n) for n in names)
    convert(source, output, force=True, link=True)
    for path in output.iterdir():
        path.unlink()
    assert contents(source) == before and hidden(tmp_path) == []


def test_what_cannot_be_linked_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = swin(tmp_path / "m")
    before, link, refused = contents(source), os.link, []

    def first_only(old: Path, new: Path) -> None:
        if "00001" not in new.name:
            refused.append(new)
            raise OSError(18, "Invalid cross-device link")
        link(old, new)

    monkeypatch.setattr(os, "link", first_only)
    output = convert(source, tmp_path / "out", link=True)
    assert len(refused) == 2 and caplog.text.count("cannot be linked") == 2
    shared = [(output / path.name).samefile(path) for path in sorted(source.glob("*.safetensors"))]
    assert shared == [True, False, False] and contents(source) == before
    load_model(output)


def test_a_link_that_a_killed_run_left_is_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = swin(tmp_path / "m")
    before = contents(source)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", link=True, copying=_interrupt)
    assert partial(tmp_path / "out").exists()

    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    convert(source, tmp_path / "out", link=True)
    assert contents(source) == before


def _interrupt(done: int, total: int, name: str) -> None:
    raise KeyboardInterrupt


def test_only_shards_are_linked_and_only_where_they_stay(tmp_path: Path) -> None:
    pickled = swin(tmp_path / "pickled", "bin")
    output = convert(pickled, tmp_path / "out", link=True)
    assert all(path.stat().st_nlink == 1 for path in output.iterdir())
    with pytest.raises(UsageError, match="nothing can be linked: the input does not lie in shards"):
        convert_checkpoint(write_tiny(tmp_path / "one.safetensors"), link=True, **TINY)

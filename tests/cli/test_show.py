"""``flashbias-convert show``."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashbias_convert.checkpoint import read_plan
from tests.checkpoint.models import write_tiny

from .conftest import Cli


def test_the_header_alone_says_what_was_done(
    cli: Cli, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli("show", converted)
    assert (done.code, done.err) == (0, "")
    assert "timm:swinv2_tiny_window8_256" in done.out
    assert "options: energy 0.99" in done.out
    assert "layers.0.blocks.0.attn" in done.out
    assert "3 of 3 sites converted" in done.out


def test_json_holds_the_plan(cli: Cli, converted: Path) -> None:
    data = cli("show", converted, "--json").json()
    assert data["plan"] == read_plan(converted).to_json()
    assert data["counts"] == {"patched": 3}


def test_a_file_that_was_not_converted(cli: Cli, tmp_path: Path) -> None:
    done = cli("show", write_tiny(tmp_path / "x.safetensors"))
    assert (done.code, done.out) == (1, "")
    assert "is not a converted checkpoint" in done.err and "hint: convert it" in done.err

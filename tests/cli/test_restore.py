"""``flashbias-convert restore``."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.models import ARCH, write_tiny

from .conftest import Cli
from .test_errors import assert_error


def test_the_original_comes_back(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert cli(path, *ARCH, "-q").code == 0
    done = cli("restore", tmp_path / "x.flashbias.safetensors")
    restored = tmp_path / "x.restored.safetensors"
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote {restored}: ") and "bit for bit" in done.out
    assert restored.read_bytes() == path.read_bytes()
    again = cli("restore", tmp_path / "x.flashbias.safetensors")
    assert_error(again, 2, "x.restored.safetensors exists", "--force")
    options = ["--force", "--json", "-o", restored]
    forced = cli("restore", tmp_path / "x.flashbias.safetensors", *options)
    assert forced.code == 0 and forced.json()["output"] == str(restored)
    assert forced.json()["notes"] == []


def test_what_was_not_converted(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert_error(cli("restore", path), 1, "is not a converted checkpoint")
    assert_error(cli("restore", tmp_path / "nowhere"), 1, "does not exist")

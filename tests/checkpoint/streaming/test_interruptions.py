"""An interrupted conversion goes on where it stopped, and ends with the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashbias_convert.checkpoint import convert_checkpoint

from ..sharded import contents, write_bloom
from .shards import convert, hidden, partial, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Stop:
    """Interrupts when a shard begins."""

    def __init__(self, at: str, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error = at, error

    def __call__(self, done: int, total: int, name: str) -> None:
        assert 0 < done <= total
        if self.at in name:
            raise self.error


def interrupted(tmp_path: Path, layout: str = "safetensors") -> tuple[Path, Path]:
    """A source and an output, of which two shards are there and the third is not."""
    source, output = swin(tmp_path / "m", layout), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, output, copying=Stop("00003-of"))
    assert not output.exists() and partial(output).is_dir()
    return source, output


def test_it_goes_on_where_it_stopped(tmp_path: Path, layout: str, copies: list[str]) -> None:
    source, output = interrupted(tmp_path, layout)
    expected = contents(convert(source, tmp_path / "at once"))
    copies.clear()
    convert(source, output)
    assert copies == ["model-00003-of-00003.safetensors"]
    assert contents(output) == expected and hidden(tmp_path) == []


@pytest.mark.parametrize("damage", ["a byte", "its length", "it is gone", "journal", "torn"])
def test_what_is_left_is_not_trusted(tmp_path: Path, damage: str, copies: list[str]) -> None:
    source, output = interrupted(tmp_path)
    expected = contents(convert(source, tmp_path / "at once"))
    shard = partial(output) / "out" / "model-00001-of-00003.safetensors"
    journal = partial(output) / "journal.jsonl"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    if damage == "a byte":
        shard.write_bytes(content)
    elif damage == "its length":
        shard.write_bytes(content[:-5])
    elif damage == "it is gone":
        shard.unlink()
    elif damage == "journal":  # says that the third shard is finished, too
        with journal.open("a") as file:
            file.write('\n{"file": "model-00003-of-00003.safetensors"}')
    else:
        journal.write_bytes(journal.read_bytes()[:-60])
    copies.clear()
    convert(source, output)
    first, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
    kept = {"journal": [third], "torn": [first, "model-00002-of-00003.safetensors", third]}
    assert copies == kept.get(damage, [first, third])
    assert contents(output) == expected


@pytest.mark.parametrize("change", ["input", "options"])
def test_another_conversion_starts_anew(tmp_path: Path, change: str, copies: list[str]) -> None:
    from flashbias_convert.options import DecomposeOptions

    source, output = interrupted(tmp_path)
    options = DecomposeOptions(energy=0.9) if change == "options" else DecomposeOptions()
    if change == "input":
        path = sorted(source.glob("*.safetensors"))[0]
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    copies.clear()
    convert(source, output, options=options)
    assert len(copies) == 3
    assert contents(output) == contents(convert(source, tmp_path / "b", options=options))


def test_killed_half_way(tmp_path: Path) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 4, hidden_size=32, vocab_size=512)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.sharded"]
    output = tmp_path / "out"
    done = subprocess.run([*command, str(source), str(output), str(size // 2)])
    assert done.returncode == -9
    assert not output.exists()
    held = set(p.name for p in (partial(output) / "out").iterdir())
    assert held and not any("00004-of" in name for name in held)
    convert_checkpoint(source, output)
    convert_checkpoint(source, tmp_path / "at once")
    assert contents(output) == contents(tmp_path / "at once") and hidden(tmp_path) == []


def test_a_small_file_that_vanished_is_not_taken_from_an_earlier_run(tmp_path: Path) -> None:
    source, output = swin(tmp_path / "m"), tmp_path / "out"
    (source / "notes.txt").write_text("old")

    def check(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, output, check=check)
    assert (partial(output) / "out" / "notes.txt").exists()
    (source / "notes.txt").unlink()
    convert(source, output)
    assert not (output / "notes.txt").exists()

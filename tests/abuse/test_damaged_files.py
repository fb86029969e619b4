"""Damaged checkpoints: each works and equals, or is refused in one line; nothing else happens."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from . import damage_archives, damage_bytes, damage_folders, damage_plans, damage_safetensors
from .amount import amount
from .conftest import Count
from .judge import try_to_convert, try_to_load, try_to_restore
from .tiny import NAME, Good

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ARCH = f"timm:{NAME}"
#: these say themselves what they are; the others are searched for among hundreds of models
TELLING = ("folder: config_values", "folder: config_numbers", "folder: config_text", "archive")
#: makes one damaged checkpoint in a folder, and says what to open
Maker = Callable[[Random, Good, Path], Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good.make(tmp_path_factory.mktemp("good"))


def _written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def _bytes(damage: damage_bytes.ByteDamage, which: str) -> Maker:
    def make(rng: Random, good: Good, folder: Path) -> Path:
        source: Path = getattr(good, which)
        return _written(folder, source.name, bytes(damage(rng, bytearray(source.read_bytes()))))

    return make


def _safetensors(damage: Callable[..., bytes], which: str) -> Maker:
    def make(rng: Random, good: Good, folder: Path) -> Path:
        source: Path = getattr(good, which)
        parts = damage_safetensors.split(source.read_bytes())
        return _written(folder, source.name, damage(rng, *parts))

    return make


def _archive(damage: Callable[..., bytes]) -> Maker:
    def make(rng: Random, good: Good, folder: Path) -> Path:
        found = damage_archives.records(good.archive.read_bytes())
        return _written(folder, rng.choice(["x.pth", "x.ckpt", "x.bin"]), damage(rng, found))

    return make


def _code(rng: Random, good: Good, folder: Path) -> Path:
    return _written(folder, "x.pth", damage_archives.code(rng, {}, folder / "trap"))


def _plan(damage: Callable[..., bytes], in_folder: bool) -> Maker:
    def make(rng: Random, good: Good, folder: Path) -> Path:
        data = damage(rng, *damage_plans.opened(good.converted.read_bytes()))
        if not in_folder:
            return _written(folder, "x.safetensors", data)
        shutil.copytree(good.converted_folder, folder / "model")
        _written(folder / "model", "model.safetensors", data)
        return folder / "model"

    return make


def _makers() -> Iterator[tuple[str, Maker]]:
    for which, (name, damage) in itertools.product(
        ("bare", "archive", "legacy", "converted"), damage_bytes.DAMAGES.items()
    ):
        yield f"{which}: {name}", _bytes(damage, which)
    for which, (name, structured) in itertools.product(
        ("bare", "converted"), damage_safetensors.DAMAGES.items()
    ):
        yield f"{which}: {name}", _safetensors(structured, which)
    for name, archived in damage_archives.DAMAGES.items():
        yield f"archive: {name}", _archive(archived)
    yield "archive: code", _code
    for name, maker in damage_folders.DAMAGES.items():
        yield f"folder: {name}", maker
    for name, planned in damage_plans.DAMAGES.items():
        yield f"converted: {name}", _plan(planned, in_folder=False)
    yield "converted folder: plan_values", _plan(damage_plans.plan_values, in_folder=True)


MAKERS = dict(_makers())


@pytest.mark.parametrize("kind", MAKERS)
def test_damaged(kind: str, good: Good, tmp_path: Path, count: Count) -> None:
    ended: Counter[str] = Counter()
    for seed in range(amount(1, 13)):
        root = tmp_path / str(seed)
        root.mkdir()
        path = MAKERS[kind](Random(f"{kind} {seed}"), good, root)
        arch = None if kind.startswith(TELLING) else ARCH
        try:
            ended[try_to_convert(path, root, arch)] += 1
            count("files", kind.split(":")[0])
            _remove_outputs(root)
            ended[try_to_load(path, root)] += 1
            ended[try_to_restore(path, root)] += 1
            _remove_outputs(root)
        except Exception as error:
            error.add_note(f"{kind}, seed {seed}: {path}")
            raise
        assert not (root / "trap").exists(), "code ran"
        shutil.rmtree(root)
    for outcome, times in ended.items():
        count("conversions, loads and restorations of damaged files", outcome, times)


def _remove_outputs(root: Path) -> None:
    for result in (*root.glob("*.flashbias*"), *root.glob("*.restored*")):
        shutil.rmtree(result) if result.is_dir() else result.unlink()

"""Output in shards: the same tensors in several files, and an index that lists them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, read_plan, write
from flashbias_convert.checkpoint.outputs import output_path
from flashbias_convert.checkpoint.shards import split
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.options import DecomposeOptions, shard_bytes
from tests.timm_abilities import REMEMBERS, needs
from tests.toy import TOY

from .models import ARGS, NAME, TiedToy, images, tiny_model, write_tiny, write_tiny_folder
from .test_write import PLAN, names, no_space

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIZE = "40KB"


def convert(path: Path, **options: Any) -> Path:
    if path.is_file():
        options = {"arch": f"timm:{NAME}", "arch_args": ARGS, **options}
    done = convert_checkpoint(path, **{"max_shard_size": SIZE, **options})
    assert done.output is not None and done.plan_file is not None and done.plan_file.is_file()
    return done.output


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(images())
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_file_becomes_a_folder_of_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_tiny(tmp_path / "tiny.safetensors", dtype)
    (tmp_path / "neighbour.txt").touch()
    folder = convert(path)
    whole = convert(path, max_shard_size=None)
    assert folder == tmp_path / "tiny.flashbias"
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    others = {"model.plan.json", "model.safetensors.index.json"}
    assert set(names(folder)) == others | {p.name for p in shards}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored, expected = {}, load_file(whole)
    for shard in shards:
        part = load_file(shard)
        size = sum(t.nbytes for t in part.values())
        assert size <= 40_000 or len(part) == 1
        assert all(index["weight_map"][key] == shard.name for key in part)
        stored |= part
    assert stored.keys() == expected.keys() == index["weight_map"].keys()
    for key, tensor in expected.items():
        assert stored[key].dtype == tensor.dtype and torch.equal(stored[key], tensor)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert torch.equal(run(load_model(folder)), run(load_model(whole)))


def test_a_folder_keeps_its_files(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "m")
    folder = convert(source)
    assert (folder / "README.md").read_text() == "about this model"
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    loaded = load_model(folder)
    assert loaded.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    assert torch.equal(run(loaded), run(load_model(convert(source, output=tmp_path / "o"))))


def test_weights_that_fit_are_one_file_without_an_index(tmp_path: Path) -> None:
    folder = convert(write_tiny(tmp_path / "tiny.safetensors"), max_shard_size="5GB")
    assert names(folder) == ["model.plan.json", "model.safetensors"]
    load_model(folder)


def test_shards_load_from_the_index_and_carry_the_plan(tmp_path: Path) -> None:
    folder = convert(write_tiny(tmp_path / "tiny.safetensors"))
    index = folder / "model.safetensors.index.json"
    assert torch.equal(run(load_model(index)), run(load_model(folder)))
    assert len(read_plan(index).patched) == 3
    with pytest.raises(CheckpointError, match="was converted already"):
        convert_checkpoint(folder)


def test_replacing_leaves_no_old_shard(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.safetensors")
    folder = convert(path)
    with pytest.raises(UsageError, match=r"exists.*--force"):
        convert(path)
    many = len(names(folder))
    assert convert(path, force=True, max_shard_size="100KB") == folder
    assert len(names(folder)) < many
    load_model(folder)
    assert convert(path, force=True, output=folder) == folder  # named, it is the folder itself


def test_shards_of_two_conversions_do_not_mix(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.safetensors")
    exact = convert(path, output=tmp_path / "a")
    coarse = convert(path, output=tmp_path / "b", options=DecomposeOptions(energy=0.9))
    index = json.loads((exact / "model.safetensors.index.json").read_text())["weight_map"]
    name = index["head.fc.weight"]
    held = load_file(exact / name)
    with safetensors.safe_open(next(coarse.glob("*.safetensors")), "pt") as other:
        save_file(held, exact / name, metadata=other.metadata())
    with pytest.raises(CheckpointError, match="of different conversions"):
        load_model(exact)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = convert(write_tiny(tmp_path / "tiny.safetensors"))
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_model(folder)


def test_a_model_in_memory_is_saved_in_shards(tmp_path: Path) -> None:
    model = tiny_model()
    needs(hasattr(model, "_model_args"), REMEMBERS)
    patch_model(model)
    save_model(model, tmp_path / "out", max_shard_size=SIZE)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(run(load_model(tmp_path / "out")), run(model))
    with pytest.raises(UsageError, match="exists"):
        save_model(model, tmp_path / "out", max_shard_size=SIZE)
    with pytest.raises(UsageError, match="is a folder, not a file"):
        save_model(model, tmp_path / "x.safetensors", max_shard_size=SIZE)


def test_tied_weights_are_stored_once_in_shards(tmp_path: Path) -> None:
    model = TiedToy().eval()
    patch_model(model, recipes=[TOY], force_all=True)
    save_model(model, tmp_path / "out", arch=TiedToy, recipes=[TOY], max_shard_size=100)
    stored = read_checkpoint(tmp_path / "out").tensors
    assert ("embed.weight" in stored) != ("head.weight" in stored)
    loaded = load_model(tmp_path / "out", arch=TiedToy, recipes=[TOY])
    assert loaded.head.weight is loaded.embed.weight


def test_views_of_one_memory_are_counted_apart() -> None:
    whole = torch.zeros(100)
    parts = {str(i): whole[10 * i : 10 * i + 10] for i in range(10)}
    assert len(split(parts, 80).files) == 5
    assert split(parts, 400).files == {"model.safetensors": list(parts)}
    assert split(parts, 80).total == split(parts, 400).total == 400


# -- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2])
def test_a_full_disk_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls: list[Path] = []

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == failing:
            no_space()
        safetensors.torch.save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(write, "save_file", save)
    with pytest.raises(CheckpointError, match=r"nothing was kept: .*No space left"):
        write.write_folder(tmp_path / "out", two_tensors(), PLAN, max_bytes=40)
    assert names(tmp_path) == []


def two_tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(10), "b": torch.ones(10)}


def test_the_index_comes_last_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text
    seen: list[set[str]] = []

    def spy(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name.endswith(".index.json"):
            seen.append(set(names(path.parent)))
            assert not (tmp_path / "out").exists()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", spy)
    write.write_folder(tmp_path / "out", two_tensors(), PLAN, max_bytes=40)
    shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert seen == [{"model.plan.json", *shards}]


def test_a_failing_rename_gives_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_folder(tmp_path / "out", two_tensors(), PLAN, max_bytes=40)
    before = shutil.copytree(tmp_path / "out", tmp_path / "copy")
    real = os.rename

    def fails(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write.write_folder(tmp_path / "out", {"a": torch.zeros(1)}, PLAN, force=True)
    assert names(tmp_path) == ["copy", "out"]
    assert names(tmp_path / "out") == names(before)


# -- names and sizes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (" 10KB ", 10_000), ("2TB", 2 * 10**12), (7, 7)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0GB", "0", 0, -3, "5GiB", "nanGB", True])
def test_sizes_that_make_no_sense(text: Any) -> None:
    with pytest.raises(UsageError, match="size of a shard"):
        shard_bytes(text)


def test_where_shards_go(tmp_path: Path) -> None:
    source = tmp_path / "m.ckpt"
    assert output_path(source, None, sharded=True) == tmp_path / "m.flashbias"
    assert output_path(source, tmp_path / "new", sharded=True) == tmp_path / "new"
    assert output_path(source, tmp_path, sharded=True) == tmp_path / "m.flashbias"
    with pytest.raises(UsageError, match="shards go into a folder"):
        output_path(source, tmp_path / "x.safetensors", sharded=True)


def test_a_file_in_place_of_the_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    path = write_tiny(tmp_path / "tiny.safetensors")
    with pytest.raises(UsageError, match="made by no conversion"):
        convert(path, output=tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "precious"

"""Restoring: the source's tensors, bit for bit, under its names, with its metadata."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashbias_convert import patch_model, save_model
from flashbias_convert.checkpoint import convert_checkpoint, restore, restore_checkpoint
from flashbias_convert.checkpoint.origin import SOURCE_KEY, Origin
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.options import DecomposeOptions
from tests.toy import TOY

from .models import ARGS, NAME, TiedToy, tiny_model, tiny_weights, write_tiny, write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TINY: dict[str, Any] = {"arch": f"timm:{NAME}", "arch_args": ARGS}


def convert(path: Path, **options: Any) -> Path:
    done = convert_checkpoint(path, **(options or TINY))
    assert done.output is not None
    return done.output


def assert_same(restored: Path, tensors: dict[str, Tensor]) -> None:
    found = load_file(restored)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def metadata_of(path: Path) -> dict[str, str] | None:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_file_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    nan = torch.full((32,), float("nan"), dtype=torch.float32)  # of another dtype than the rest
    source = write_tiny(tmp_path / "x.safetensors", dtype, **{"norm.bias": nan})
    done = restore_checkpoint(convert(source))
    assert done.output == tmp_path / "x.restored.safetensors" and done.notes == ()
    assert_same(done.output, load_file(source))
    assert metadata_of(done.output) == metadata_of(source) == {"format": "pt"}
    assert done.output.read_bytes() == source.read_bytes()
    assert done.output.stat().st_mode == (tmp_path / "x.flashbias.plan.json").stat().st_mode


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "author": "me"}, {"only": "this"}])
def test_the_metadata_comes_back(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file(tiny_weights(), tmp_path / "x.safetensors", metadata=metadata)
    done = restore_checkpoint(convert(tmp_path / "x.safetensors"))
    assert metadata_of(done.output) == metadata


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_prefixes_come_back(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + name: tensor for name, tensor in tiny_weights(torch.float16).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(restore_checkpoint(convert(tmp_path / "x.safetensors")).output, tensors)


def test_other_names_come_back_and_lost_tensors_are_told(tmp_path: Path) -> None:
    weights = tiny_weights()
    # the layout of the first authors, which timm maps to its own
    first = {
        name.replace("head.fc.", "head.").replace("layers.1.downsample", "layers.0.downsample"): t
        for name, t in weights.items()
    }
    buffers = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(2, 2)}
    torch.save({"model": {**first, **buffers}, "epoch": 3}, tmp_path / "x.pth")
    done = restore_checkpoint(convert(tmp_path / "x.pth"))
    assert_same(done.output, first)
    assert "the source was x.pth; only its weights are restored" in done.notes
    assert any("1 tensors of the source were no weights" in note for note in done.notes)


@pytest.mark.parametrize("stored", ["both", "embed.weight", "head.weight"])
def test_tied_tensors_come_back_as_they_were_stored(tmp_path: Path, stored: str) -> None:
    tensors = {k: v.clone() for k, v in TiedToy().state_dict().items()}
    if stored != "both":
        del tensors["head.weight" if stored == "embed.weight" else "embed.weight"]
    save_file(tensors, tmp_path / "x.safetensors")
    output = convert(
        tmp_path / "x.safetensors",
        arch=TiedToy,
        recipes=[TOY],
        options=DecomposeOptions(force_all=True),
    )
    assert_same(restore_checkpoint(output).output, tensors)


def test_a_folder_comes_back_with_its_configs(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "m", torch.float16)
    output = convert_checkpoint(source).output
    assert output is not None
    done = restore_checkpoint(output)
    assert done.output == tmp_path / "m.restored"
    assert sorted(p.name for p in done.output.iterdir()) == sorted(p.name for p in source.iterdir())
    for path in source.iterdir():
        assert (done.output / path.name).read_bytes() == path.read_bytes()


def test_shards_come_back_as_one_file(tmp_path: Path) -> None:
    folder, weights = tmp_path / "m", tiny_weights(torch.float16)
    folder.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {key: names[at % 2] for at, key in enumerate(weights)}
    for name in names:
        save_file({k: t for k, t in weights.items() if where[k] == name}, folder / name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = restore_checkpoint(convert(folder))
    assert_same(done.output / "model.safetensors", weights)
    assert "the source had 2 shards, this is one file" in done.notes


def test_transformers_come_back(tmp_path: Path) -> None:
    """transformers ties, renames and casts by its own rules while it loads."""
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(
        image_size=32, patch_size=2, embed_dim=16, depths=[1], num_heads=[2], window_size=8
    )
    model = Swinv2ForImageClassification(config).half()
    model.save_pretrained(tmp_path / "m")
    from flashbias_convert.checkpoint import open_model

    opened = open_model(tmp_path / "m")
    origin = Origin.of(opened.checkpoint, opened.stored)
    source = load_file(tmp_path / "m" / "model.safetensors")
    restored = origin.restore(opened.stored)
    assert origin.lost == () and restored.keys() == source.keys()
    assert all(torch.equal(restored[k], source[k]) for k in source)
    assert {t.dtype for t in restored.values()} == {t.dtype for t in source.values()}


# -- what cannot be restored ---------------------------------------------------------------


def edit_tensors(path: Path, key: str) -> None:
    tensors, metadata = load_file(path), metadata_of(path)
    tensors[key] = tensors[key] + 1
    save_file(tensors, path, metadata=metadata)


def test_changed_weights_are_not_passed_off_as_the_original(tmp_path: Path) -> None:
    output = convert(write_tiny(tmp_path / "x.safetensors"))
    edit_tensors(output, "norm.bias")
    with pytest.raises(CheckpointError, match="changed since"):
        restore_checkpoint(output)
    assert not (tmp_path / "x.restored.safetensors").exists()


def test_a_model_saved_from_memory_keeps_its_names(tmp_path: Path) -> None:
    model = tiny_model()
    patch_model(model)
    save_model(model, tmp_path / "x.safetensors")
    done = restore_checkpoint(tmp_path / "x.safetensors")
    assert_same(done.output, tiny_weights())
    assert "does not say how its source named" in done.notes[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": [], "more": 1}'])
def test_a_damaged_record_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Origin.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [3]},
        {"files": "x"},
        {"metadata": "x"},
        {"metadata": {"a": 1}},
        {"renamed": ["a"]},
        {"renamed": {"a": None}},
        {"omitted": [["a"]]},
        {"lost": None},
    ],
)
def test_a_record_with_other_values_is_an_error(change: dict) -> None:
    good = json.loads(Origin(("a",), {"x": "y"}, {"p": "q"}, ("r",), ("s",), "t").to_json())
    with pytest.raises(CheckpointError, match="what the file says of its source is damaged"):
        Origin.from_json(json.dumps({**good, **change}))


def test_the_record_survives_its_text() -> None:
    origin = Origin(("a", "b"), {"x": "y"}, {"p": "q"}, ("r",), ("s",), "t")
    assert Origin.from_json(origin.to_json()) == origin


def test_what_was_not_converted_is_not_restored(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        restore_checkpoint(write_tiny(tmp_path / "x.safetensors"))


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    output = convert(write_tiny(tmp_path / "x.safetensors"))
    tensors, metadata = load_file(output), metadata_of(output)
    record = json.loads((metadata or {})[SOURCE_KEY])
    record["renamed"] = {"a": "nothing"}
    save_file(tensors, output, metadata={**(metadata or {}), SOURCE_KEY: json.dumps(record)})
    with pytest.raises(CheckpointError, match="lacks nothing"):
        restore_checkpoint(output)


# -- names ---------------------------------------------------------------------------------


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "x.safetensors")
    output, target = convert(source), tmp_path / "y.safetensors"
    target.write_text("precious")
    with pytest.raises(UsageError, match=r"exists.*--force"):
        restore_checkpoint(output, target)
    assert target.read_text() == "precious"
    restore_checkpoint(output, target, force=True)
    assert target.read_bytes() == source.read_bytes()
    for force in (False, True):
        with pytest.raises(UsageError, match="would change the input"):
            restore_checkpoint(output, output, force=force)
        with pytest.raises(UsageError, match=r"must end in \.safetensors"):
            restore_checkpoint(output, tmp_path / "y.pt", force=force)
    assert restore_checkpoint(output, tmp_path).output == tmp_path / "x.restored.safetensors"


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    output = convert_checkpoint(write_tiny_folder(tmp_path / "m")).output
    assert output is not None
    before = (tmp_path / "m" / "config.json").read_bytes()
    for force in (False, True):
        with pytest.raises(UsageError, match="never replaced"):
            restore_checkpoint(output, tmp_path / "m", force=force)
        with pytest.raises(UsageError, match="would change the input"):
            restore_checkpoint(output, output / "inner", force=force)
    assert (tmp_path / "m" / "config.json").read_bytes() == before


@pytest.mark.parametrize("folder", [False, True])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    source = write_tiny_folder(tmp_path / "m")
    output = convert_checkpoint(source if folder else source / "model.safetensors").output
    assert output is not None
    before = sorted(tmp_path.rglob("*"))

    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(restore, "save_file", no_space)
    with pytest.raises(CheckpointError, match="nothing was kept: No space left"):
        restore_checkpoint(output)
    assert sorted(tmp_path.rglob("*")) == before

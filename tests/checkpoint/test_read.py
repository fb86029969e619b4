"""Reading: every format, every wrapper, and nothing that a file asks for."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashbias_convert.checkpoint import read_checkpoint
from flashbias_convert.errors import CheckpointError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def assert_equal(found: dict[str, Tensor], meant: dict[str, Tensor]) -> None:
    assert found.keys() == meant.keys()
    for key, value in meant.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".tar"])
@pytest.mark.parametrize("how", ["zip", "legacy", "safetensors"])
def test_content_decides_and_not_the_suffix(tmp_path: Path, suffix: str, how: str) -> None:
    path = tmp_path / f"x{suffix}"
    if how == "safetensors":
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=how == "zip")
    assert_equal(read_checkpoint(path).tensors, WEIGHTS)


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model": WEIGHTS, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}},
        {"model": {"state_dict": WEIGHTS}},
        {"ema": WEIGHTS, "model": {k: v + 1 for k, v in WEIGHTS.items()}},
        {"model_ema": WEIGHTS, "model": {k: v + 1 for k, v in WEIGHTS.items()}},
        {"state_dict": {k: v + 1 for k, v in WEIGHTS.items()}, "state_dict_ema": WEIGHTS},
        {"state_dict": WEIGHTS, "state_dict_ema": None},
        {"model": WEIGHTS, "max_accuracy": torch.tensor(81.0)},
    ],
)
def test_wrappers_come_off(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pth")
    found = read_checkpoint(tmp_path / "x.pth")
    assert_equal(found.tensors, WEIGHTS)
    assert found.notes and "took the weights from" in found.notes[0]


@pytest.mark.parametrize(
    "prefixes",
    [("module.", ""), ("_orig_mod.module.", "module._orig_mod."), ("module.module.",) * 2],
)
def test_prefixes_come_off_in_any_order(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    keyed = {p + k: v for p, (k, v) in zip(prefixes, WEIGHTS.items(), strict=True)}
    torch.save({"state_dict": keyed}, tmp_path / "x.pth")
    assert_equal(read_checkpoint(tmp_path / "x.pth").tensors, WEIGHTS)


def test_prefixes_that_hide_two_tensors_are_an_error(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="two tensors are called 'a'"):
        read_checkpoint(tmp_path / "x.pth")


@pytest.mark.parametrize("prefix", ["model.", "net._orig_mod.", "module.model.module."])
def test_the_name_of_the_model_in_a_lightning_module_comes_off(tmp_path: Path, prefix: str) -> None:
    keyed = {prefix + k: v for k, v in WEIGHTS.items()}
    torch.save({"state_dict": keyed, "pytorch-lightning_version": "2.4.0"}, tmp_path / "x.ckpt")
    assert_equal(read_checkpoint(tmp_path / "x.ckpt").tensors, WEIGHTS)
    torch.save({"state_dict": keyed | {"loss.w": torch.ones(1)}}, tmp_path / "y.ckpt")
    assert any(
        key.startswith(("model", "net")) for key in read_checkpoint(tmp_path / "y.ckpt").tensors
    )


def test_training_arguments_are_kept_beside_the_weights(tmp_path: Path) -> None:
    content = {"state_dict": WEIGHTS, "arch": "x", "args": argparse.Namespace(lr=1.0)}
    torch.save(content, tmp_path / "x.pth")
    found = read_checkpoint(tmp_path / "x.pth")
    assert found.extras["arch"] == "x"
    assert found.extras["args"].lr == 1.0


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"big": torch.zeros(1000)}, path)
    with path.open("r+b") as file:  # a later change shows: the values were not read yet
        found = read_checkpoint(path).tensors["big"]
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80\x3f")
    assert found[-1] == 1.0


# -- shards and folders --------------------------------------------------------------------


def write_shards(folder: Path, suffix: str = ".safetensors") -> Path:
    base = "model" if suffix == ".safetensors" else "pytorch_model"
    names = [f"{base}-0000{i}-of-00002{suffix}" for i in (1, 2)]
    for name, key in zip(names, WEIGHTS, strict=True):
        part = {key: WEIGHTS[key]}
        save_file(part, folder / name) if base == "model" else torch.save(part, folder / name)
    index = folder / f"{base}{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(WEIGHTS, names, strict=True))}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_read_from_the_folder_or_the_index(tmp_path: Path, suffix: str) -> None:
    index = write_shards(tmp_path, suffix)
    assert_equal(read_checkpoint(tmp_path).tensors, WEIGHTS)
    assert_equal(read_checkpoint(index).tensors, WEIGHTS)


def test_one_shard_alone_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(CheckpointError, match="one shard of several"):
        read_checkpoint(tmp_path / "model-00001-of-00002.safetensors")


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_checkpoint(tmp_path)


def test_a_shard_without_its_tensor_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="lacks 1 tensors that the index lists"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "a\\b", "", 7, "sub/x"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", [["x"], {}, None, "a" * 300, "\0"])
def test_names_of_shards_that_are_none(tmp_path: Path, name: Any) -> None:
    index = write_shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match=r"outside its folder|cannot be read|is missing"):
        read_checkpoint(tmp_path)


def test_a_config_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*outside its folder"):
        read_checkpoint(folder)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        read_checkpoint(tmp_path / ("x" * 300))


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_checkpoint(folder)


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert_equal(read_checkpoint(snapshot).tensors, WEIGHTS)


@pytest.mark.parametrize("complete", [False, True])
def test_a_whole_file_comes_before_an_index_that_was_left_beside_it(
    tmp_path: Path, complete: bool
) -> None:
    """As in transformers; the index of an older model must not add or replace anything."""
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    shard = "model-00001-of-00002.safetensors"
    older = {key: torch.zeros_like(value) for key, value in WEIGHTS.items()}
    older["another"] = torch.ones(1)
    index = {"weight_map": dict.fromkeys(older, shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if complete:
        save_file(older, tmp_path / shard)
    assert_equal(read_checkpoint(tmp_path).tensors, WEIGHTS)


def test_a_folder_with_two_unnamed_files_is_ambiguous(tmp_path: Path) -> None:
    for name in ("x.pth", "y.pth"):
        torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several weight files: x\.pth, y\.pth"):
        read_checkpoint(tmp_path)


# -- damage --------------------------------------------------------------------------------


def damaged(tmp_path: Path, kind: str) -> Path:
    """A path to something that is no checkpoint."""
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.zeros(100)}, whole)
    torch.save({"a": torch.zeros(100)}, tmp_path / "whole.pth")
    header = b'{"a":{"dtype":"F32","shape":[999999999999],"data_offsets":[0,3999999999996]}}'
    contents = {
        "empty.pt": b"",
        "truncated.safetensors": whole.read_bytes()[:200],
        "truncated.pth": (tmp_path / "whole.pth").read_bytes()[:400],
        "huge_header.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        "huge_tensor.safetensors": len(header).to_bytes(8, "little") + header,
        "bad_json.safetensors": (4).to_bytes(8, "little") + b"{{{{",
        "text.pt": b"this is no checkpoint at all",
        "zip.pt": b"PK\x03\x04 and nothing else",
    }
    path = tmp_path / kind
    if kind in contents:
        path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing.pt", "does not exist"),
        ("empty.pt", "is empty"),
        ("truncated.safetensors", "damaged"),
        ("truncated.pth", "damaged"),
        ("huge_header.safetensors", "damaged"),
        ("huge_tensor.safetensors", "damaged"),
        ("bad_json.safetensors", "damaged"),
        ("text.pt", "neither a safetensors file nor"),
        ("zip.pt", "damaged"),
    ],
)
def test_damage_is_one_clear_line(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(damaged(tmp_path, kind))
    assert "\n" not in str(caught.value)
    assert kind in str(caught.value)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, how: str) -> None:
    trap, path = tmp_path / "trap", tmp_path / "x.ckpt"
    content = {"state_dict": WEIGHTS, "extra": Malicious(trap)}
    if how == "plain":
        path.write_bytes(pickle.dumps(content["extra"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_code_in_a_pickle_is_named(tmp_path: Path, how: str, protocol: int) -> None:
    trap, path = tmp_path / "trap", tmp_path / "x.ckpt"
    # the names of the second are in the memo of the first
    content = {"extra": [Malicious(trap), Malicious(trap)]}
    if how == "plain":
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        is_zip = how == "zip"
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        CheckpointError, match=r"could run code \(.*\); nothing was loaded"
    ) as caught:
        read_checkpoint(path)
    assert "Path" in str(caught.value) or "getattr" in str(caught.value)
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_an_unreadable_pickle_is_no_reason_to_run_its_code(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.pt", pickle_protocol=4)
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint: ") as caught:
        read_checkpoint(tmp_path / "x.pt")
    assert "weights_only" not in str(caught.value)


def test_a_pickled_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"could run code .*torch\.nn.*state_dict\(\)"):
        read_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"epoch": 3}, [1, 2], torch.ones(2)])
def test_no_state_dict_is_an_error(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"no tensors|expected a state dict"):
        read_checkpoint(tmp_path / "x.pt")


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        read_checkpoint(tmp_path)

"""What a header says of names: each tensor is read under its name in the model, or nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.checkpoint.file_names import by_model_names, names_entry
from flashbias_convert.checkpoint.header import LINKED_KEY, NAMES_KEY, PLAN_KEY, linked_of
from flashbias_convert.errors import CheckpointError

from .models import ARGS, NAME, images, tiny_weights, write_tiny
from .sharded import write_shards

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TENSORS = {"a": torch.zeros(1), "b": torch.ones(2), "c": torch.ones(3)}


def named(names: Any) -> dict[str, str]:
    """A header with a plan and this entry, as it is or as JSON."""
    return {PLAN_KEY: "{}", NAMES_KEY: names if isinstance(names, str) else json.dumps(names)}


def test_only_names_that_differ_are_written() -> None:
    assert names_entry({"a": "a"}) == {} == names_entry({})
    assert names_entry({"a": "x", "b": "b"}) == {NAMES_KEY: '{"a": "x"}'}


@pytest.mark.parametrize(
    "names", [{"a": "x"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "\ud800"}, {}]
)
def test_every_tensor_is_read_in_order(names: dict[str, str]) -> None:
    found = by_model_names(TENSORS, named(names))
    assert list(found) == [names.get(key, key) for key in TENSORS]
    assert all(tensor is TENSORS[key] for key, tensor in zip(TENSORS, found.values(), strict=True))


def test_what_is_not_converted_keeps_its_names() -> None:
    assert by_model_names(TENSORS, {NAMES_KEY: '{"a": "x"}'}) == TENSORS


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{", "are damaged"),
        ("[" * 100_000, "are damaged"),
        ("null", "they are no object"),
        ([["a", "x"]], "they are no object"),
        ("a", "are damaged"),
        ({"a": 3}, "that of 'a' is no text"),
        ({"a": {"b": "c"}}, "that of 'a' is no text"),
        ('{"a": "x", "a": "y"}', "a tensor is named twice"),
        ({"z" * 10_000: "a"}, r"names a tensor 'z{200}\.\.\.', which is not there"),
        ({"a": "b"}, "two tensors are called 'b'"),
        ({"a": "x", "b": "x"}, "two tensors are called 'x'"),
    ],
)
def test_damaged_names_are_refused(names: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        by_model_names(TENSORS, named(names))


@pytest.mark.parametrize("linked", ["{", "[" * 100_000, "3", '{"a": 1}'])
def test_a_damaged_list_of_links_is_refused(linked: str) -> None:
    with pytest.raises(CheckpointError, match="the list of linked shards is"):
        linked_of({LINKED_KEY: linked})


def rewritten(path: Path, names: dict[str, str], entry: dict[str, str]) -> None:
    """Give the tensors of a converted file other names, and its header an entry."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **entry}
    save_file({names.get(k, k): t for k, t in load_file(path).items()}, path, metadata=metadata)


def test_a_file_with_other_names_is_loaded_and_restored_under_them(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "x.safetensors")
    output = convert_checkpoint(source, arch=f"timm:{NAME}", arch_args=ARGS).output
    assert output is not None
    before, x = read_checkpoint(output), images()
    with torch.no_grad():
        expected = load_model(output)(x)
    names = {"norm.weight": "norm.bias", "norm.bias": "norm.weight", "head.fc.bias": "other"}
    rewritten(output, {v: k for k, v in names.items()} | {"head.fc.bias": "other"}, {})
    back = {"norm.weight": "norm.bias", "norm.bias": "norm.weight", "other": "head.fc.bias"}
    rewritten(output, {}, names_entry(back))
    after = read_checkpoint(output)
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[key], t) for key, t in before.tensors.items())
    assert after.names == {key: key for key in before.tensors} | {v: k for k, v in back.items()}
    with torch.no_grad():
        assert torch.equal(load_model(output)(x), expected)
    # the record of the source speaks of names in the file
    with pytest.raises(CheckpointError, match="changed since"):
        restore_checkpoint(output)


@pytest.mark.parametrize("shards", [None, 3])
def test_an_entry_of_a_source_without_a_plan_says_nothing(
    tmp_path: Path, shards: int | None
) -> None:
    """It stays with what is known of the source, and the output is read by its own."""
    entry = {NAMES_KEY: '{"norm.bias": "norm.weight", "nowhere": "norm.bias"}'}
    if shards is None:
        source = write_tiny(tmp_path / "x.safetensors")
        rewritten(source, {}, entry)
    else:
        source = write_shards(tmp_path / "m", tiny_weights(), "safetensors", shards)
        for path in source.glob("*.safetensors"):
            rewritten(path, {}, entry)
    before = read_checkpoint(source)
    output = convert_checkpoint(source, arch=f"timm:{NAME}", arch_args=ARGS).output
    assert output is not None and NAMES_KEY not in read_checkpoint(output).metadata
    load_model(output)
    back = read_checkpoint(restore_checkpoint(output).output)
    assert back.metadata == before.metadata and back.tensors.keys() == before.tensors.keys()

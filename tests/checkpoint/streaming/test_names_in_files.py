"""Shards keep the names in them, whatever the model calls its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashbias_convert import load_model, save_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.checkpoint.copied_shards import require_apart
from flashbias_convert.checkpoint.header import LINKED_KEY, NAMES_KEY
from flashbias_convert.checkpoint.origin import SOURCE_KEY, Origin
from flashbias_convert.checkpoint.shards import Split
from flashbias_convert.errors import CheckpointError
from flashbias_convert.verification import verify_files

from ..sharded import contents
from .other_names import MAKERS, Made, transformers_beit, transformers_swin, without_prefix
from .shards import TERMS, hidden, partial
from .test_interruptions import Stop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(params=MAKERS, ids=lambda maker: str(maker.__name__))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A checkpoint whose weights have other names in the model; options, and an input."""
    found: Made = request.param(tmp_path / "m")
    return found


def shards(folder: Path) -> list[dict[str, Tensor]]:
    """What each file of weights holds, but for that of the terms, in order."""
    files = sorted([*folder.glob("model-0*.safetensors"), *folder.glob("pytorch_model-0*.bin")])
    read = {".safetensors": load_file, ".bin": torch.load}
    return [read[path.suffix](path) for path in files]


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == t.dtype and torch.equal(found[key], t) for key, t in expected.items()
    )


@torch.no_grad()
def outputs(path: Path, x: Any) -> Tensor:
    model: Any = load_model(path)
    found = model(x)
    result: Tensor = found if isinstance(found, Tensor) else found[0]
    return result


def test_every_shard_has_the_tensors_and_the_names_of_its_source(
    made: Made, tmp_path: Path
) -> None:
    source, options, _ = made
    before = contents(source)
    done = convert_checkpoint(source, tmp_path / "out", **options)
    assert done.held is None and done.notes == ()
    pairs = list(zip(shards(tmp_path / "out"), shards(source), strict=True))
    assert len(pairs) > 2 and all(same_bits(found, expected) for found, expected in pairs)
    terms = load_file(tmp_path / "out" / TERMS)
    assert terms and all("score_bias." in key for key in terms)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == terms.keys() | {k for held, _ in pairs for k in held}
    assert contents(source) == before and hidden(tmp_path) == []


def test_it_is_what_a_conversion_in_memory_makes(made: Made, tmp_path: Path) -> None:
    source, options, x = made
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    convert_checkpoint(source, apart, **options)
    assert convert_checkpoint(source, whole, **options, max_shard_size="1GB").held is not None
    found, expected = read_checkpoint(apart), read_checkpoint(whole)
    assert same_bits(found.tensors, expected.tensors)
    assert torch.equal(outputs(apart, x), outputs(whole, x))
    differing = {n: k for k, n in found.names.items() if n != k and not k.startswith("module.")}
    assert json.loads(found.metadata.get(NAMES_KEY, "{}")).items() >= differing.items()
    save_model(load_model(apart), tmp_path / "own.safetensors")
    assert torch.equal(outputs(tmp_path / "own.safetensors", x), outputs(apart, x))


def test_the_source_comes_back(made: Made, tmp_path: Path) -> None:
    source, options, _ = made
    convert_checkpoint(source, tmp_path / "out", **options)
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back").output / "model.safetensors"
    assert same_bits(load_file(back), {k: t for held in shards(source) for k, t in held.items()})
    with safe_open(back, framework="pt") as file:
        origin = Origin.from_json(read_checkpoint(tmp_path / "out").metadata[SOURCE_KEY])
        assert file.metadata() == origin.metadata
    assert origin.renamed == {} and not set(origin.omitted) & load_file(back).keys()


def test_a_second_conversion_is_refused(made: Made, tmp_path: Path) -> None:
    source, options, _ = made
    convert_checkpoint(source, tmp_path / "out", **options)
    with pytest.raises(CheckpointError, match="was converted already"):
        convert_checkpoint(tmp_path / "out", tmp_path / "twice", **options)


def test_an_interrupted_conversion_ends_with_the_same_bytes(
    made: Made, tmp_path: Path, copies: list[str]
) -> None:
    source, options, _ = made
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", **options, copying=Stop("00002-of"))
    assert partial(tmp_path / "out").is_dir()
    convert_checkpoint(source, tmp_path / "at once", **options)
    copies.clear()
    convert_checkpoint(source, tmp_path / "out", **options)
    assert copies and not any("00001-of" in name for name in copies)
    assert contents(tmp_path / "out") == contents(tmp_path / "at once")
    assert hidden(tmp_path) == []


def test_other_names_for_the_same_weights_are_another_conversion(
    tmp_path: Path, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run left under the same names in files is not gone on with."""
    from flashbias_convert.checkpoint import streaming

    source, options, _ = transformers_swin(tmp_path / "m")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(streaming, "names_entry", lambda names: {NAMES_KEY: "{}"})
        convert_checkpoint(source, tmp_path / "out", **options, copying=Stop("00002-of"))
    copies.clear()
    convert_checkpoint(source, tmp_path / "out", **options)
    assert len(copies) == len(shards(source))


def test_shards_are_linked(made: Made, tmp_path: Path, copies: list[str]) -> None:
    source, options, x = made
    if any(source.glob("*.bin")):
        pytest.skip("only shards of safetensors are linked")
    before = contents(source)
    convert_checkpoint(source, tmp_path / "copied", **options)
    copies.clear()
    convert_checkpoint(source, tmp_path / "linked", **options, link=True)
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert copies == [] and all((tmp_path / "linked" / n).samefile(source / n) for n in names)
    linked, copied = (read_checkpoint(tmp_path / n) for n in ("linked", "copied"))
    assert linked.metadata == {**copied.metadata, LINKED_KEY: json.dumps(names)}
    assert linked.names == copied.names and same_bits(linked.tensors, copied.tensors)
    assert torch.equal(outputs(tmp_path / "linked", x), outputs(tmp_path / "copied", x))
    back = restore_checkpoint(tmp_path / "linked", tmp_path / "back").output
    expected = {k: t for held in shards(source) for k, t in held.items()}
    assert same_bits(load_file(back / "model.safetensors"), expected)
    assert contents(source) == before


def as_before(folder: Path) -> None:
    """What was written before names stayed: all under those of the model."""
    checkpoint = read_checkpoint(folder)
    names = json.loads(checkpoint.metadata.get(NAMES_KEY, "{}"))
    origin = Origin.from_json(checkpoint.metadata[SOURCE_KEY])
    omitted = (*(name for name in names.values() if name not in names), *origin.omitted)
    metadata = {key: text for key, text in checkpoint.metadata.items() if key != NAMES_KEY}
    metadata[SOURCE_KEY] = replace(origin, renamed=names, omitted=omitted).to_json()
    files: dict[str, list[str]] = {}
    for path in folder.glob("*.safetensors"):
        held = {names.get(key, key): tensor for key, tensor in load_file(path).items()}
        save_file(held, path, metadata=metadata)
        files[path.name] = list(held)
    Split(files, 0).write_index(folder)


def test_what_was_written_under_the_names_of_the_model_still_loads(
    made: Made, tmp_path: Path
) -> None:
    source, options, x = made
    convert_checkpoint(source, tmp_path / "out", **options)
    expected, tensors = outputs(tmp_path / "out", x), read_checkpoint(tmp_path / "out").tensors
    as_before(tmp_path / "out")
    found = read_checkpoint(tmp_path / "out")
    assert found.names == {key: key for key in tensors} and same_bits(found.tensors, tensors)
    assert torch.equal(outputs(tmp_path / "out", x), expected)
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back").output / "model.safetensors"
    assert same_bits(load_file(back), {k: t for held in shards(source) for k, t in held.items()})


def test_verify_compares_weights_by_the_names_of_the_model(tmp_path: Path) -> None:
    source, options, _ = transformers_swin(tmp_path / "m")
    convert_checkpoint(source, tmp_path / "out", **options)
    assert verify_files(source, tmp_path / "out", samples=2).passed
    shard = sorted((tmp_path / "out").glob("model-0*"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    reasons = " ".join(verify_files(source, tmp_path / "out", samples=2).reasons)
    assert "1 weights in the converted file are not those of the original, such as swin." in reasons


@torch.no_grad()
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("maker", [transformers_swin, transformers_beit, without_prefix])
def test_transformers_loads_it(
    tmp_path: Path, maker: Callable[[Path], Made], link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    from flashbias_convert.huggingface import FlashBiasConfig
    from flashbias_convert.swap import patched_modules

    source, options, x = maker(tmp_path / "m")
    done = convert_checkpoint(source, tmp_path / "out", **options, link=link)
    name = json.loads((source / "config.json").read_text())["architectures"][0]
    cls, how = getattr(transformers, name), {"dtype": torch.float32}
    model = cls.from_pretrained(tmp_path / "out", quantization_config=FlashBiasConfig(), **how)
    assert len(patched_modules(model)) == len(done.plan.patched)
    assert "UNEXPECTED" not in caplog.text and "MISSING" not in caplog.text
    assert torch.equal(model.eval()(x)[0], outputs(tmp_path / "out", x))
    plain, original = (cls.from_pretrained(tmp_path / n, **how).eval() for n in ("out", "m"))
    assert torch.equal(plain(x)[0], original(x)[0])


def test_a_tensor_that_is_called_as_a_term_is_refused() -> None:
    require_apart({"a": "x"}, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="a tensor in the files has the name of a term: 'a'"):
        require_apart({"a": "x"}, {"a": torch.zeros(1)})

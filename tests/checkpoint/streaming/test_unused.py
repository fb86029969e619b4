"""What is no weight of the model stays in its shard, and nobody who loads the model sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.checkpoint.header import LINKED_KEY, NAMES_KEY, PLAN_KEY, UNUSED_KEY
from flashbias_convert.checkpoint.origin import SOURCE_KEY, Origin
from flashbias_convert.checkpoint.unused_tensors import split_unused, unused_entry
from flashbias_convert.errors import CheckpointError, FlashBiasError
from flashbias_convert.verification import verify_files

from ..sharded import contents, write_bloom, write_shards
from .other_names import Made
from .shards import TERMS, hidden, partial
from .test_interruptions import Stop
from .test_names_in_files import outputs, same_bits, shards
from .with_unused import OLD, old_swin_of_transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TENSORS = {"a": torch.zeros(1), "b": torch.ones(2), "c": torch.ones(3)}


@pytest.fixture(params=OLD, ids=lambda maker: str(maker.__name__))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A checkpoint with more than its weights; options, and an input."""
    found: Made = request.param(tmp_path / "m")
    return found


def unused_in(source: Path) -> list[str]:
    names = [key for held in shards(source) for key in held]
    return [n for n in names if n.endswith("relative_position_index") or n == "extra.step"]


def all_of(source: Path) -> dict[str, Tensor]:
    return {key: tensor for held in shards(source) for key, tensor in held.items()}


def test_only_terms_are_new(made: Made, tmp_path: Path) -> None:
    source, options, x = made
    before, unused = contents(source), unused_in(source)
    assert sum(not held.keys().isdisjoint(unused) for held in shards(source)) > 1
    done = convert_checkpoint(source, tmp_path / "out", **options)
    (note,) = done.notes
    assert done.held is None
    assert note.startswith(f"{len(unused)} tensors are no weights of the model and copied, but not")
    pairs = list(zip(shards(tmp_path / "out"), shards(source), strict=True))
    assert all(same_bits(found, expected) for found, expected in pairs)
    assert all("score_bias." in key for key in load_file(tmp_path / "out" / TERMS))
    found = read_checkpoint(tmp_path / "out")
    assert json.loads(found.metadata[UNUSED_KEY]) == sorted(unused) == sorted(found.unused)
    assert not set(unused) & {*found.tensors, *found.names.values()}
    whole = convert_checkpoint(source, tmp_path / "whole", **options, max_shard_size="1GB")
    assert whole.held is not None and same_bits(
        found.tensors, read_checkpoint(tmp_path / "whole").tensors
    )
    assert torch.equal(outputs(tmp_path / "out", x), outputs(tmp_path / "whole", x))
    assert verify_files(source, tmp_path / "out", samples=2).passed
    assert contents(source) == before and hidden(tmp_path) == []


def test_all_of_it_comes_back(made: Made, tmp_path: Path) -> None:
    source, options, _ = made
    convert_checkpoint(source, tmp_path / "out", **options)
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back")
    assert same_bits(load_file(back.output / "model.safetensors"), all_of(source))
    assert not any("not restored" in note for note in back.notes)
    assert Origin.from_json(read_checkpoint(tmp_path / "out").metadata[SOURCE_KEY]).lost == ()
    name = unused_in(source)[-1]
    for path in (tmp_path / "out").glob("model-0*"):
        held = load_file(path)
        if name in held:
            rewrite(path, {**held, name: held[name] + 1})
    with pytest.raises(CheckpointError, match="changed since"):
        restore_checkpoint(tmp_path / "out", tmp_path / "again")


def test_an_interruption_changes_nothing(made: Made, tmp_path: Path, copies: list[str]) -> None:
    source, options, _ = made
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", **options, copying=Stop("00002-of"))
    convert_checkpoint(source, tmp_path / "at once", **options)
    copies.clear()
    convert_checkpoint(source, tmp_path / "out", **options)
    assert copies and not any("00001-of" in name for name in copies)
    assert contents(tmp_path / "out") == contents(tmp_path / "at once")


def test_killed_half_way(tmp_path: Path) -> None:
    source, _, _ = old_swin_of_transformers(tmp_path / "m")
    size = sum(tensor.nbytes for tensor in all_of(source).values())
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.sharded"]
    done = subprocess.run([*command, str(source), str(tmp_path / "out"), str(size // 2)])
    assert done.returncode == -9 and not (tmp_path / "out").exists()
    assert partial(tmp_path / "out").is_dir()
    convert_checkpoint(source, tmp_path / "out")
    convert_checkpoint(source, tmp_path / "at once")
    assert contents(tmp_path / "out") == contents(tmp_path / "at once") and hidden(tmp_path) == []


def test_its_shards_are_linked(made: Made, tmp_path: Path, copies: list[str]) -> None:
    source, options, x = made
    if any(source.glob("*.bin")):
        pytest.skip("only shards of safetensors are linked")
    convert_checkpoint(source, tmp_path / "out", **options, link=True)
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert copies == [] and all((tmp_path / "out" / n).samefile(source / n) for n in names)
    assert json.loads(read_checkpoint(tmp_path / "out").metadata[LINKED_KEY]) == names
    assert torch.isfinite(outputs(tmp_path / "out", x)).all()
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back").output
    assert same_bits(load_file(back / "model.safetensors"), all_of(source))


@torch.no_grad()
@pytest.mark.parametrize("link", [False, True])
def test_transformers_loads_it(tmp_path: Path, link: bool) -> None:
    import transformers

    from flashbias_convert.huggingface import FlashBiasConfig
    from flashbias_convert.swap import patched_modules

    source, options, x = old_swin_of_transformers(tmp_path / "m")
    done = convert_checkpoint(source, tmp_path / "out", **options, link=link)
    cls, how = transformers.SwinForImageClassification, {"dtype": torch.float32}
    model = cls.from_pretrained(tmp_path / "out", quantization_config=FlashBiasConfig(), **how)
    assert len(patched_modules(model)) == len(done.plan.patched)
    assert torch.equal(model.eval()(x)[0], outputs(tmp_path / "out", x))
    plain, original = (cls.from_pretrained(tmp_path / n, **how).eval() for n in ("out", "m"))
    assert torch.equal(plain(x)[0], original(x)[0])


def test_one_tensor_of_a_pickle_under_two_names_stays_under_both(tmp_path: Path) -> None:
    source = write_bloom(tmp_path / "m", "bin", 2, hidden_size=16)
    tensors = {key: t.clone() for key, t in read_checkpoint(source).tensors.items()}
    tied = tensors["transformer.word_embeddings.weight"]
    write_shards(source, {"lm_head.weight": tied, "ema": tied, **tensors}, "bin", 2)
    done = convert_checkpoint(source, tmp_path / "out")
    assert done.notes == ("1 tensor is no weight of the model and copied, but not used: ema",)
    pairs = list(zip(shards(tmp_path / "out"), shards(source), strict=True))
    assert all(same_bits(found, expected) for found, expected in pairs)
    found = read_checkpoint(tmp_path / "out")
    assert NAMES_KEY not in found.metadata and list(found.unused) == ["ema"]
    ids = torch.arange(12)[None]
    convert_checkpoint(source, tmp_path / "whole", max_shard_size="1GB")
    assert torch.equal(outputs(tmp_path / "out", ids), outputs(tmp_path / "whole", ids))
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back").output
    assert same_bits(load_file(back / "model.safetensors"), all_of(source))


# -- the entry -----------------------------------------------------------------------------


def test_the_entry_is_written_where_it_says_something() -> None:
    assert unused_entry([]) == {} and unused_entry(["b", "a"]) == {UNUSED_KEY: '["a", "b"]'}
    assert split_unused(TENSORS, {UNUSED_KEY: "{"}) == (TENSORS, {})
    used, unused = split_unused(TENSORS, {PLAN_KEY: "{}", UNUSED_KEY: '["c", "a"]'})
    assert list(used) == ["b"] and list(unused) == ["a", "c"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "list of unused tensors is damaged"),
        ("[" * 100_000, "list of unused tensors is damaged"),
        ("null", "it is no list of names"),
        ('{"a": 1}', "it is no list of names"),
        ('"a"', "it is no list of names"),
        ('["a", 3]', "it is no list of names"),
        ('["a", "a"]', "it names one twice"),
        (json.dumps(["z" * 10_000]), r"an unused tensor 'z{200}\.\.\.', which is not there"),
        ('["b"]', "by its header 'b' is a weight, and unused"),
    ],
)
def test_a_damaged_entry_is_refused(entry: str, message: str) -> None:
    header = {PLAN_KEY: "{}", NAMES_KEY: '{"b": "x"}', UNUSED_KEY: entry}
    with pytest.raises(CheckpointError, match=message):
        split_unused(TENSORS, header)


def rewrite(path: Path, tensors: dict[str, Tensor], **entries: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **entries}
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("what", ["a weight", "a tied weight", "a term"])
def test_an_entry_that_names_what_the_model_needs_is_refused(tmp_path: Path, what: str) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 2, hidden_size=16)
    output = convert_checkpoint(source, tmp_path / "out").output
    name = {
        "a weight": "transformer.ln_f.weight",
        "a tied weight": "transformer.word_embeddings.weight",
        "a term": min(load_file(tmp_path / "out" / TERMS)),
    }[what]
    for path in (tmp_path / "out").glob("*.safetensors"):
        rewrite(path, load_file(path), **unused_entry([name]))
    calls: list[Any] = [load_model, lambda path: verify_files(source, path, samples=2)]
    for call in calls:
        with pytest.raises(FlashBiasError) as refused:
            call(output)
        assert isinstance(refused.value, CheckpointError) and "\n" not in str(refused.value)


def test_without_the_entry_a_file_is_read_as_before(tmp_path: Path) -> None:
    """What was written before left such tensors out, and said so."""
    source, options, x = old_swin_of_transformers(tmp_path / "m")
    convert_checkpoint(source, tmp_path / "old", **options, max_shard_size="100KB")
    found = read_checkpoint(tmp_path / "old")
    assert UNUSED_KEY not in found.metadata and found.unused == {}
    lost = Origin.from_json(found.metadata[SOURCE_KEY]).lost
    assert sorted(lost) == sorted(unused_in(source))
    assert torch.isfinite(outputs(tmp_path / "old", x)).all()
    back = restore_checkpoint(tmp_path / "old", tmp_path / "back")
    assert any("were no weights" in note for note in back.notes)
    held = load_file(back.output / "model.safetensors")
    assert held.keys() == all_of(source).keys() - set(lost)

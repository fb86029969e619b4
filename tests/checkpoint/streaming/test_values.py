"""Shards are converted one by one, to what a conversion in memory makes, bit for bit."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.checkpoint.mapped import open_mapped
from flashbias_convert.checkpoint.origin import note_of_lost
from flashbias_convert.inspection import inspect_model
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.recipe import Description, LeftAlone, Registry, Site
from flashbias_convert.views import site_views
from tests.toy import TOY, BiasedAttention, ToyModel

from ..models import TiedToy, images, tiny_weights
from ..sharded import contents, write_bloom, write_shards
from .shards import TERMS, TINY, convert, hidden, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_same_as_in_memory(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    source = swin(tmp_path / "m", layout, dtype)
    before = contents(source)
    apart = convert(source, tmp_path / "apart")
    whole = convert(source, tmp_path / "whole", max_shard_size="1GB")
    found, expected = read_checkpoint(apart), read_checkpoint(whole)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert found.tensors[key].dtype == tensor.dtype
        assert torch.equal(found.tensors[key], tensor), key
    assert found.metadata == expected.metadata  # the plan and what is known of the source
    assert (apart / "model.plan.json").read_bytes() == (whole / "model.plan.json").read_bytes()
    x = images().double() if dtype == torch.float64 else images()
    with torch.no_grad():
        assert torch.equal(load_model(apart)(x), load_model(whole)(x))
    assert contents(source) == before and hidden(tmp_path) == []


def test_the_shards_stay_and_one_is_new(tmp_path: Path, layout: str) -> None:
    source = swin(tmp_path / "m", layout)
    output = convert(source, tmp_path / "out")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in output.glob("*.safetensors")) == [*names, TERMS]
    where = json.loads(next(source.glob("*.index.json")).read_text())["weight_map"]
    for name, old in zip(names, sorted(set(where.values())), strict=True):
        held = load_file(output / name)
        assert set(held) == {key for key, file in where.items() if file == old}
        assert all(index["weight_map"][key] == name for key in held)
    assert all(".score_bias." in key for key in load_file(output / TERMS))
    stored = [t for p in output.glob("*.safetensors") for t in load_file(p).values()]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored)


def test_restored_bit_for_bit(tmp_path: Path, layout: str) -> None:
    output = convert(swin(tmp_path / "m", layout), tmp_path / "out")
    done = restore_checkpoint(output, tmp_path / "back")
    held = load_file(done.output / "model.safetensors")
    assert held.keys() == tiny_weights().keys()
    assert all(torch.equal(held[k], t) for k, t in tiny_weights(torch.float16).items())


@pytest.mark.parametrize("names", ["as they are", "without the prefix", "with both tied"])
def test_a_language_model_under_each_of_its_names(tmp_path: Path, names: str) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 3, hidden_size=16)
    tensors = read_checkpoint(source).tensors
    if names == "without the prefix":
        tensors = {key.removeprefix("transformer."): t for key, t in tensors.items()}
    elif names == "with both tied":
        tensors = {**tensors, "lm_head.weight": tensors["transformer.word_embeddings.weight"]}
    source = write_shards(tmp_path / "m", {k: t.clone() for k, t in tensors.items()}, "x")
    done = convert_checkpoint(source, tmp_path / "out")
    whole = convert_checkpoint(source, tmp_path / "whole", max_shard_size="1GB")
    assert done.plan.to_json() == whole.plan.to_json() and done.notes == ()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = (load_model(tmp_path / n)(ids).logits for n in ("out", "whole"))
    assert torch.equal(found, expected)
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back").output
    held = load_file(back / "model.safetensors")
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in tensors.items())


def test_only_the_sources_of_the_bias_at_hand_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = swin(tmp_path / "m"), []
    known: Any = Registry().by_name("timm_swinv2")

    def describe(site: Site) -> Description:
        found = known.describe(site)
        wide = {n for n, t in site.root.state_dict().items() if t.dtype == torch.float32}
        seen.append((site.name, wide))
        return found

    done = convert_checkpoint(
        source, tmp_path / "out", **TINY, recipes=[replace(known, describe=describe)]
    )
    assert [name for name, _ in seen] == [site.name for site in done.plan.sites]
    parts = ("logit_scale", "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")
    assert all(wide == {f"{name}.{part}" for part in parts} for name, wide in seen)
    terms = {n for n, _ in done.model.named_buffers() if ".score_bias." in n}
    weights = {n: t for n, t in done.model.state_dict().items() if n not in terms}
    assert {t.dtype for t in weights.values()} == {torch.float16}


def test_what_a_picture_shows_is_computed_in_the_same_dtype(tmp_path: Path) -> None:
    source = swin(tmp_path / "m")
    views: list[Any] = []
    ways: list[dict[str, Any]] = [{}, {"max_shard_size": "1GB"}]
    for options in ways:
        done = convert_checkpoint(
            source, tmp_path / str(len(options)), **{**TINY, **options},
            on_plan=lambda plan, model: views.append(list(site_views(model, plan))),
        )  # fmt: skip
        assert len(done.plan.patched) == 3
    for apart, whole in zip(*views, strict=True):
        assert apart.note == whole.note == "" and torch.equal(apart.bias, whole.bias)


def test_the_model_can_be_pickled_and_copied(tmp_path: Path) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 3, hidden_size=16)
    model = convert_checkpoint(source, tmp_path / "out").model
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(inspect_model(copied).patched) == 2


def test_a_site_that_fails_leaves_no_wide_weights(tmp_path: Path) -> None:
    known = Registry().by_name("timm_swinv2")

    def describe(site: Site) -> Description:
        raise LeftAlone("because")

    options: dict[str, Any] = {**TINY, "recipes": [replace(known, describe=describe)]}
    opened = open_mapped(read_checkpoint(swin(tmp_path / "m")), **options)
    plan = inspect_model(opened.model, recipes=opened.recipes)
    assert [site.reason for site in plan.sites] == 3 * ["because"]
    assert {t.dtype for t in opened.model.state_dict().values()} == {torch.float16}


@pytest.mark.parametrize("computes", [torch.bfloat16, torch.float64])
def test_another_dtype_to_compute_in(tmp_path: Path, computes: torch.dtype) -> None:
    source = swin(tmp_path / "m", dtype=torch.float32)
    apart = convert(source, tmp_path / "apart", dtype=computes)
    whole = convert(source, tmp_path / "whole", max_shard_size="1GB", dtype=computes)
    found, expected = read_checkpoint(apart).tensors, read_checkpoint(whole).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


class BufferedAttention(BiasedAttention):
    """Its bias is a buffer that checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        table = self.table.detach()
        del self.table
        self.register_buffer("table", table)


class Buffered(ToyModel):
    """Of such attention."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            block.attn = BufferedAttention()  # type: ignore[assignment]


def assert_as_in_memory(source: Path, folder: Path, **options: Any) -> None:
    """The tensors that are written shard by shard are those of a model that is held in memory."""
    output = convert(source, folder / "out", **options)
    whole = convert(source, folder / "whole", max_shard_size="1GB", **options)
    found, expected = read_checkpoint(output).tensors, read_checkpoint(whole).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_bias_that_is_a_buffer(tmp_path: Path) -> None:

    tensors = Buffered().bfloat16().state_dict()
    source = write_shards(tmp_path / "m", tensors, "safetensors", 2)
    options: dict[str, Any] = {"arch": Buffered, "arch_args": None, "recipes": [TOY]}
    options["options"] = DecomposeOptions(method="svd", energy=0.9)
    assert_as_in_memory(source, tmp_path, **options)


def test_tied_weights_of_a_callers_model(tmp_path: Path) -> None:
    tensors = {k: v.clone() for k, v in TiedToy().state_dict().items() if k != "head.weight"}
    source = write_shards(tmp_path / "m", tensors, "safetensors")

    options: dict[str, Any] = {"arch": TiedToy, "arch_args": None, "recipes": [TOY]}
    output = convert(source, tmp_path / "out", options=DecomposeOptions(force_all=True), **options)
    loaded: Any = load_model(output, arch=TiedToy, recipes=[TOY])
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.embed.weight, tensors["embed.weight"])


@torch.no_grad()
def test_transformers_loads_the_shards_and_the_terms(tmp_path: Path) -> None:
    from transformers import BloomForCausalLM

    from flashbias_convert.huggingface import FlashBiasConfig
    from flashbias_convert.swap import patched_modules

    convert_checkpoint(
        write_bloom(tmp_path / "m", "safetensors", 3, hidden_size=16), tmp_path / "out"
    )
    model = BloomForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FlashBiasConfig(), dtype=torch.float32
    ).eval()
    assert len(patched_modules(model)) == 2
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, load_model(tmp_path / "out")(ids).logits)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = swin(tmp_path / "m")
    done = convert_checkpoint(source, dry_run=True, **TINY)
    assert len(done.plan.patched) == 3 and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_toy_model_of_many_sites(tmp_path: Path) -> None:

    model = ToyModel(4)
    source = write_shards(tmp_path / "m", dict(model.state_dict()), "safetensors", 2)
    options: dict[str, Any] = {"arch": ToyModel, "arch_args": {"depth": 4}, "recipes": [TOY]}
    options["options"] = DecomposeOptions(method="svd", energy=0.9)
    assert_as_in_memory(source, tmp_path, **options)


def shared_beit() -> Any:
    """A BEiT whose blocks share a table, which lies in none of them."""
    from timm.models.beit import Beit

    return Beit(
        img_size=32,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=3,
        use_abs_pos_emb=False,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=True,
    )


def test_a_table_that_blocks_share(tmp_path: Path) -> None:
    model = shared_beit()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    source = write_shards(tmp_path / "m", model.bfloat16().state_dict(), "safetensors", 2)
    options: dict[str, Any] = {"arch": shared_beit, "arch_args": None}
    output = convert(source, tmp_path / "out", **options)
    whole = convert(source, tmp_path / "whole", max_shard_size="1GB", **options)
    found, expected = read_checkpoint(output).tensors, read_checkpoint(whole).tensors
    assert found.keys() == expected.keys() and len(read_checkpoint(output).metadata) > 1
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize("way", ["in memory", "one file"])
def test_tensors_that_the_model_has_no_name_for_are_told(tmp_path: Path, way: str) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 3, hidden_size=16)
    more = {"foo": torch.ones(3), "transformer.h.0.extra.weight": torch.ones(2, 2)}
    tensors = {key: t.clone() for key, t in read_checkpoint(source).tensors.items()} | more
    write_shards(source, tensors, "safetensors", 3)
    if way == "one file":
        for path in source.glob("model*"):
            path.unlink()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {"max_shard_size": "1GB"} if way == "in memory" else {}
    done = convert_checkpoint(source, tmp_path / "out", **options)
    told = "2 tensors are no weights of the model and left out of the output: "
    assert done.notes == (f"{told}foo, transformer.h.0.extra.weight",)
    back = restore_checkpoint(tmp_path / "out", tmp_path / "back")
    assert any("2 tensors of the source were no weights" in note for note in back.notes)
    held = load_file(back.output / "model.safetensors")
    assert held.keys() == tensors.keys() - more.keys()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in held.items())


def test_a_long_list_of_tensors_is_cut() -> None:
    (note,) = note_of_lost([f"t{i}" for i in range(25)])
    assert note.startswith("25 tensors") and note.endswith("t18, t19 and 5 more")
    assert note_of_lost(["t"]) == (
        "1 tensor is no weight of the model and left out of the output: t",
    )

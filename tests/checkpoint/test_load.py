"""Loading: a converted file computes, bit for bit, what the model in memory did."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.checkpoint import Conversion, convert_checkpoint, read_plan
from flashbias_convert.checkpoint.header import PLAN_KEY, TIED_KEY
from flashbias_convert.errors import (
    CheckpointError,
    NotFiniteError,
    NothingToConvertError,
    StaleTermsError,
    UnknownArchitectureError,
    UsageError,
)
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.terms import ScoreBias
from tests.support import assert_parity
from tests.timm_abilities import REMEMBERS, needs
from tests.toy import TOY

from .models import (
    ARGS,
    NAME,
    TiedToy,
    images,
    tiny_model,
    tiny_weights,
    write_tiny,
    write_tiny_folder,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    path = write_tiny(tmp_path_factory.mktemp("c") / "tiny.safetensors", torch.float16)
    options = DecomposeOptions(method="svd")
    return convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS, options=options)


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(images())
    return out


def test_the_loaded_model_is_the_converted_one(converted: Conversion) -> None:
    assert converted.output is not None
    loaded = load_model(converted.output)
    assert not loaded.training
    assert torch.equal(run(loaded), run(converted.model))
    assert read_plan(converted.output).to_json() == converted.plan.to_json()


def test_a_new_process_computes_the_same_bits(converted: Conversion, tmp_path: Path) -> None:
    code = (
        "import torch\nfrom flashbias_convert import load_model\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"  # the bits depend on it
        "from tests.checkpoint.models import images\n"
        f"with torch.no_grad(): out = load_model({str(converted.output)!r})(images())\n"
        f"torch.save(out, {str(tmp_path / 'out.pt')!r})"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), run(converted.model))


def test_the_original_tensors_are_kept_as_they_came(converted: Conversion) -> None:
    assert converted.output is not None
    stored, original = load_file(converted.output), load_file(converted.source)
    extra = stored.keys() - original.keys()
    assert extra and all(".score_bias." in key for key in extra)
    for key, value in original.items():
        assert stored[key].dtype == value.dtype == torch.float16
        assert torch.equal(stored[key], value)


def test_the_sidecar_equals_the_header(converted: Conversion) -> None:
    assert converted.plan_file is not None
    assert converted.plan_file.name == "tiny.flashbias.plan.json"
    assert json.loads(converted.plan_file.read_text()) == converted.plan.to_json()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_reaches_parameters_and_not_factors(
    converted: Conversion, dtype: torch.dtype
) -> None:
    assert converted.output is not None
    loaded = load_model(converted.output, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    factors = [b for n, b in loaded.named_buffers() if n.endswith("phi_q")]
    assert factors and {b.dtype for b in factors} == {torch.float32}
    with torch.no_grad():
        assert loaded(images().to(dtype)).dtype == dtype


def test_double_precision_is_kept(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", torch.float64)
    done = convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS)
    assert done.output is not None
    loaded = load_model(done.output)
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    with torch.no_grad():
        assert torch.equal(loaded(images().double()), done.model(images().double()))


def test_a_folder_becomes_a_folder(tmp_path: Path) -> None:
    done = convert_checkpoint(write_tiny_folder(tmp_path / "m"))
    assert done.output == tmp_path / "m.flashbias"
    expected = ["README.md", "config.json", "model.plan.json", "model.safetensors"]
    assert sorted(p.name for p in done.output.iterdir()) == expected
    loaded = load_model(done.output)
    assert torch.equal(run(loaded), run(done.model))
    assert loaded.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]


def test_a_dry_run_writes_nothing_and_patches_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS, dry_run=True)
    assert done.output is None and done.plan.patched
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert torch.equal(run(done.model), run(tiny_model()))


# -- models patched in memory --------------------------------------------------------------


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_model_in_memory_is_saved_and_loaded(tmp_path: Path, with_plan: bool) -> None:
    model = tiny_model()
    needs(hasattr(model, "_model_args"), REMEMBERS)
    plan = patch_model(model)
    save_model(model, tmp_path / "x.safetensors", plan=plan if with_plan else None)
    assert torch.equal(run(load_model(tmp_path / "x.safetensors")), run(model))


def test_half_precision_in_memory_is_saved_as_it_is(tmp_path: Path) -> None:
    model = tiny_model()
    needs(hasattr(model, "_model_args"), REMEMBERS)
    patch_model(model)
    model.bfloat16()
    save_model(model, tmp_path / "x.safetensors")
    stored = load_file(tmp_path / "x.safetensors")
    assert stored["head.fc.weight"].dtype == torch.bfloat16
    loaded = load_model(tmp_path / "x.safetensors", dtype=torch.bfloat16)
    with torch.no_grad():
        x = images().bfloat16()
        assert torch.equal(loaded(x), model(x))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = TiedToy().eval()
    patch_model(model, recipes=[TOY], force_all=True)
    path = tmp_path / "x.safetensors"
    save_model(model, path, arch=TiedToy, recipes=[TOY])
    stored = load_file(path).keys()
    assert ("embed.weight" in stored) != ("head.weight" in stored)
    loaded = load_model(path, arch=TiedToy, recipes=[TOY])
    assert loaded.head.weight is loaded.embed.weight
    x = torch.randn(1, 36, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_weights_that_only_the_config_ties_are_kept_apart(tmp_path: Path) -> None:
    model = TiedToy().eval()
    model.head.weight = nn.Parameter(model.embed.weight.detach() * 2)
    patch_model(model, recipes=[TOY], force_all=True)
    path = tmp_path / "x.safetensors"
    save_model(model, path, arch=TiedToy, recipes=[TOY])
    x = torch.randn(1, 36, 16)
    with torch.no_grad():
        assert torch.equal(load_model(path, arch=TiedToy, recipes=[TOY])(x), model(x))


def test_a_head_that_differs_from_the_embedding_is_kept_though_the_config_ties_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    assert config.tie_word_embeddings
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    save_file(weights, file, metadata={"format": "pt"})
    own = transformers.BloomForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(own.lm_head.weight, weights["lm_head.weight"])
    done = convert_checkpoint(tmp_path / "m")
    with caplog.at_level(logging.WARNING, "flashbias_convert"):
        loaded: Any = load_model(done.output, backend="sdpa")
    assert "lm_head.weight are tied in the model but differ: untied" in caplog.text
    assert torch.equal(loaded.lm_head.weight, own.lm_head.weight)
    embedding = weights["transformer.word_embeddings.weight"]
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    ids = torch.tensor([[7, 3, 9, 11]])
    with torch.no_grad():
        found, plain = loaded(ids).logits, own(ids).logits
        assert_parity(found, plain, own.double()(ids).logits)


def test_a_function_is_needed_again_to_load(tmp_path: Path) -> None:
    model = TiedToy()
    patch_model(model, recipes=[TOY], force_all=True)
    save_model(model, tmp_path / "x.safetensors", arch=TiedToy, recipes=[TOY])
    with pytest.raises(UnknownArchitectureError, match=r"TiedToy.*only the caller.*pass arch="):
        load_model(tmp_path / "x.safetensors", recipes=[TOY])
    save_model(model, tmp_path / "y.safetensors", recipes=[TOY])
    with pytest.raises(UnknownArchitectureError, match=r"does not say what model.*pass arch="):
        load_model(tmp_path / "y.safetensors", recipes=[TOY])


def test_a_new_classifier_is_saved_and_loaded(tmp_path: Path) -> None:
    model: Any = tiny_model()
    needs(hasattr(model, "_model_args"), REMEMBERS)
    model.reset_classifier(3)
    patch_model(model)
    save_model(model, tmp_path / "x.safetensors")
    assert torch.equal(run(load_model(tmp_path / "x.safetensors")), run(model))


def test_a_model_that_was_rebuilt_by_hand_needs_its_function(tmp_path: Path) -> None:
    def rebuilt() -> nn.Module:
        model: Any = tiny_model()
        model.head.fc = nn.Linear(32, 7)
        return model

    model = rebuilt().eval()
    needs(hasattr(model, "_model_args"), REMEMBERS)
    patch_model(model)
    path = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match=r"2 tensors differ, such as head\.fc\.bias.*pass arch="):
        save_model(model, path)
    assert not list(tmp_path.iterdir())
    save_model(model, path, arch=rebuilt)
    assert torch.equal(run(load_model(path, arch=rebuilt)), run(model))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    model = tiny_model()
    with pytest.raises(UsageError, match="no module of this model is patched"):
        save_model(model, path)
    plan = patch_model(model)
    other = dataclasses.replace(plan, sites=plan.sites[1:])
    with pytest.raises(UsageError, match="disagree"):
        save_model(model, path, plan=other)
    with pytest.raises(UsageError, match=r"must end in \.safetensors"):
        save_model(model, tmp_path / "x.pt")
    with torch.no_grad():
        model.layers[0].blocks[0].attn.cpb_mlp[2].weight.add_(1)
    with pytest.raises(StaleTermsError):
        save_model(model, path)
    assert not list(tmp_path.iterdir())


# -- files that are not what they say ------------------------------------------------------


def edited(path: Path, folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a converted file with another plan in its header."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    plan = json.loads(metadata[PLAN_KEY])
    plan = edit(plan) or plan
    metadata[PLAN_KEY] = plan if isinstance(plan, str) else json.dumps(plan)
    save_file(load_file(path), folder / "edited.safetensors", metadata=metadata)
    return folder / "edited.safetensors"


def first_tensor(plan: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = plan["sites"][0]["spec"]["terms"][0]["tensors"]
    return next(iter(tensors.values()))


def first_static(plan: dict[str, Any]) -> dict[str, Any]:
    static: dict[str, Any] = plan["sites"][0]["spec"]["terms"][0]["static"]
    return static


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.update(format_version=99), "format version 99.*update"),
        (lambda p: first_tensor(p).update(dtype="float99"), "float99"),
        (lambda p: first_tensor(p).update(shape=[10**9, 10**9]), "the file has"),
        (lambda p: p["sites"][0]["spec"]["terms"][0].update(name="gone"), "which the file lacks"),
        (lambda p: first_static(p).update(heads=[1, 0]), "layout"),
        (lambda p: p["sites"][0]["spec"].pop("terms") and None, "damaged"),
        (lambda p: p["sites"][0].pop("reason") and None, "damaged"),
        (lambda p: p["sites"][0]["spec"]["terms"][0].pop("static") and None, "damaged"),
        (lambda p: p["sites"].pop(0) and None, "not in the model"),
        (lambda p: p["options"].update(energy=7), "energy"),
        (lambda p: p.pop("format") and None, "not a flashbias-convert plan"),
        (lambda p: "{{{", "not JSON"),
        (lambda p: "[" * 100_000, "not JSON"),
        (lambda p: p["arch"].update(library="os"), "no known kind of architecture"),
        (lambda p: p["sites"][0]["spec"]["terms"][0].update(kind="new"), "layout"),
    ],
)
def test_a_damaged_plan_is_one_clear_error(
    converted: Conversion, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    assert converted.output is not None
    with pytest.raises(CheckpointError, match=message):
        load_model(edited(converted.output, tmp_path, edit))


TABLE = {"table": (1, 4), "u": (64,), "v": (64,)}
LOOKUP = {"table": (1, 4), "code": (64, 64)}
REGIONS = {"ids": (64,)}


@pytest.mark.parametrize(
    ("kind", "shapes", "static", "bad", "message"),
    [
        ("relative_table", TABLE, {}, "u", "relative codes reach"),
        ("relative_table", TABLE, {"heads": "0"}, "", "cannot be used"),
        ("lookup", LOOKUP, {}, "code", "codes reach"),
        ("new", LOOKUP, {}, "", "unknown kind of term"),
        ("regions", REGIONS, {"value": "much"}, "", "value"),
        ("regions", REGIONS, {"value": [1.0]}, "", "value"),
        ("regions", REGIONS, {"value": -100.0, "heads": [0.5]}, "", "heads"),
        ("regions", REGIONS, {"value": -100.0}, "", None),
        ("relative_table", TABLE, {}, "", None),
    ],
)
def test_damaged_terms_name_their_site(
    converted: Conversion,
    tmp_path: Path,
    kind: str,
    shapes: dict[str, tuple[int, ...]],
    static: dict[str, Any],
    bad: str,
    message: str | None,
) -> None:
    """A further term at one site, whole or with codes beyond its table."""
    assert converted.output is not None
    site = next(s.name for s in converted.plan.patched)
    tensors = {
        name: torch.full(shape, 99 if name == bad else 0).to(
            torch.float32 if name == "table" else torch.int32
        )
        for name, shape in shapes.items()
    }
    entry = {
        "name": kind,
        "kind": kind,
        "static": static,
        "tensors": {
            k: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for k, t in tensors.items()
        },
    }

    def add(plan: dict[str, Any]) -> None:
        spec = next(s["spec"] for s in plan["sites"] if s["name"] == site)
        spec["terms"] = [t for t in spec["terms"] if t["kind"] != kind] + [entry]

    path = edited(converted.output, tmp_path, add)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    prefix = f"{site}.score_bias.{kind}."
    kept = {k: v for k, v in load_file(path).items() if not k.startswith(prefix)}
    spec = next(s["spec"] for s in json.loads(metadata[PLAN_KEY])["sites"] if s["name"] == site)
    layout = torch.tensor(list(ScoreBias.layout(spec).encode()), dtype=torch.uint8)
    added = {prefix + k: t for k, t in tensors.items()} | {f"{site}.score_bias.layout": layout}
    save_file(kept | added, path, metadata=metadata)
    if message is None:
        load_model(path)
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(path)
    assert site in str(caught.value) or "cannot be used" in str(caught.value)


def rewritten(path: Path, folder: Path, tensors: dict[str, Any], **metadata: str) -> Path:
    """A copy of a converted file with other tensors and further metadata."""
    with safe_open(path, framework="pt") as file:
        said = dict(file.metadata())
    save_file({**load_file(path), **tensors}, folder / "other.safetensors", {**said, **metadata})
    return folder / "other.safetensors"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_no_numbers_are_refused(
    converted: Conversion, tmp_path: Path, value: float
) -> None:
    assert converted.output is not None
    stored = load_file(converted.output)
    key = next(key for key in stored if key.endswith("phi_k"))
    stored[key].view(-1)[-1] = value
    path = rewritten(converted.output, tmp_path, {key: stored[key]})
    with pytest.raises(CheckpointError, match=r"phi_k of low_rank holds NaN or infinity"):
        load_model(path)


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_damaged_list_of_tied_tensors(converted: Conversion, tmp_path: Path, text: str) -> None:
    assert converted.output is not None
    path = rewritten(converted.output, tmp_path, {}, **{TIED_KEY: text})
    with pytest.raises(CheckpointError, match="list of tied tensors"):
        load_model(path)


def test_a_file_that_was_not_converted_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a converted checkpoint.*convert it"):
        load_model(write_tiny(tmp_path / "x.safetensors"))
    torch.save(tiny_weights(), tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        load_model(tmp_path / "x.pth")


def test_a_converted_file_is_not_converted_again(converted: Conversion) -> None:
    assert converted.output is not None
    with pytest.raises(CheckpointError, match="was converted already"):
        convert_checkpoint(converted.output)


# -- models with nothing to convert, and with NaN ------------------------------------------


def test_no_biased_site_is_nothing_to_convert(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "x.pth")
    with pytest.raises(NothingToConvertError):
        convert_checkpoint(tmp_path / "x.pth", arch=lambda: nn.Linear(2, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["x.pth"]


NAN = {"layers.0.blocks.0.attn.cpb_mlp.2.weight": torch.full((1, 512), float("nan"))}


def test_nan_at_one_site_writes_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    with pytest.raises(NotFiniteError, match=r"1 of 3 sites .* layers\.0\.blocks\.0\.attn"):
        convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_site_with_nan_stays_as_it_was_if_excluded(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    excluded = ["layers.0.blocks.0.attn"]
    done = convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS, exclude=excluded)
    assert done.plan.counts() == {"left alone": 1, "patched": 2}
    assert done.output is not None and not any(
        key.startswith("layers.0.blocks.0.attn.score_bias") for key in load_file(done.output)
    )
    load_model(done.output)


def test_nan_at_the_only_site_is_a_failure_and_not_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    with pytest.raises(NotFiniteError, match=r"layers\.0\.blocks\.0\.attn"):
        convert_checkpoint(
            path,
            arch=f"timm:{NAME}",
            arch_args=ARGS,
            include=["layers.0.blocks.0.attn"],
            options=DecomposeOptions(energy=0.9),
        )
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]

"""Patched models that others save: their state dict keeps the conversion."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from flashbias_convert import StaleTermsError, load_model, patch_model, unpatch_model
from flashbias_convert.checkpoint import convert_checkpoint, read_plan
from flashbias_convert.errors import CheckpointError
from flashbias_convert.patched_attention import PatchedAttention
from tests.toy import TOY, make_input, make_model

from .models import images, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TINY_BLOOM = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}
IDS = torch.tensor([[7, 3, 9, 11, 2, 30]])


def bloom(cls: Any = transformers.BloomForCausalLM, **config: Any) -> Any:
    torch.manual_seed(0)
    return cls(transformers.BloomConfig(**TINY_BLOOM, **config)).eval()


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS)[0]
    return out


def patched_sites(model: nn.Module) -> int:
    return sum(isinstance(module, PatchedAttention) for module in model.modules())


@pytest.mark.parametrize("size", ["50GB", "4KB"])
@pytest.mark.parametrize("cls", [transformers.BloomForCausalLM, transformers.BloomModel])
def test_save_pretrained_keeps_the_conversion(tmp_path: Path, cls: Any, size: str) -> None:
    model = bloom(cls)
    patch_model(model, force_all=True)
    model.save_pretrained(tmp_path / "m", max_shard_size=size)
    loaded = load_model(tmp_path / "m")
    assert patched_sites(loaded) == 2
    assert torch.equal(run(loaded), run(model))
    assert isinstance(loaded, cls)


def test_the_config_of_a_model_is_left_alone(tmp_path: Path) -> None:
    model = bloom()
    before = model.config.to_json_string()
    patch_model(model, force_all=True)
    assert model.config.to_json_string() == before
    model.save_pretrained(tmp_path / "patched")
    unpatch_model(model)
    model.save_pretrained(tmp_path / "plain")
    configs = [(tmp_path / n / "config.json").read_text() for n in ("patched", "plain")]
    assert configs[0] == configs[1]
    assert not any("score_bias" in k for k in load_file(tmp_path / "plain" / "model.safetensors"))


@pytest.mark.parametrize("how", ["save_pretrained", "convert"])
def test_from_pretrained_gives_the_original_model(tmp_path: Path, how: str) -> None:
    model = bloom()
    expected = run(model)
    folder = tmp_path / "m"
    if how == "convert":
        model.save_pretrained(folder)
        output = convert_checkpoint(folder).output
        assert output is not None
        folder = output
    else:
        patch_model(model, force_all=True)
        model.save_pretrained(folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(loaded) is transformers.BloomForCausalLM
    assert torch.equal(run(loaded), expected)
    assert info["unexpected_keys"] and all("score_bias." in key for key in info["unexpected_keys"])
    assert not info["missing_keys"] and not info["mismatched_keys"]
    patch_model(loaded, force_all=True)  # and it can be patched


def test_a_part_of_a_model_that_was_patched_is_kept(tmp_path: Path) -> None:
    model = bloom()
    patch_model(model.transformer, force_all=True)  # one config for both
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(run(load_model(tmp_path / "m")), run(model))


def test_copies_and_casts_are_saved_as_they_are(tmp_path: Path) -> None:
    model = bloom()
    patch_model(model, force_all=True)
    other = copy.deepcopy(model).half()
    other.save_pretrained(tmp_path / "m")
    loaded = load_model(tmp_path / "m", dtype=torch.float16)
    slopes = [b for n, b in loaded.named_buffers() if n.endswith("slopes")]
    assert slopes and all(b.dtype == torch.float32 for b in slopes)
    assert torch.equal(run(loaded), run(other))


def test_a_state_dict_of_torch_keeps_the_conversion(tmp_path: Path) -> None:
    model = tiny_model()
    patch_model(model)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "x.pth")
    loaded = load_model(tmp_path / "x.pth", arch=tiny_model)
    with torch.no_grad():
        assert torch.equal(loaded(images()), model(images()))


def test_a_recipe_of_the_caller_is_found(tmp_path: Path) -> None:
    model = make_model()
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    loaded = load_model(tmp_path / "x.pt", arch=make_model, recipes=[TOY])
    assert torch.equal(loaded(make_input()), model(make_input()))
    with pytest.raises(CheckpointError, match=r"no recipe is known for 'blocks\.0.*recipes"):
        load_model(tmp_path / "x.pt", arch=make_model)
    with pytest.raises(CheckpointError, match=r"not in the model: blocks\.2"):
        load_model(tmp_path / "x.pt", arch=lambda: make_model(depth=2), recipes=[TOY])


def test_such_a_folder_is_not_converted_again_but_shown(tmp_path: Path) -> None:
    model = bloom()
    patch_model(model, force_all=True)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match="was converted already"):
        convert_checkpoint(tmp_path / "m")
    plan = read_plan(tmp_path / "m")
    assert [site.name for site in plan.patched] == [
        f"transformer.h.{i}.self_attention" for i in range(2)
    ]
    assert plan.arch is not None and plan.arch["name"] == "BloomForCausalLM"
    assert plan.patched[0].terms() == ("alibi",)


def test_no_report_of_unexpected_keys_when_they_are_expected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bloom()
    patch_model(model, force_all=True)
    model.save_pretrained(tmp_path / "m")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load_model(tmp_path / "m")
    assert "UNEXPECTED" not in caplog.text
    transformers.BloomModel.from_pretrained(tmp_path / "m")
    assert "UNEXPECTED" in caplog.text  # the log would have shown it


# -- terms that are stale when they are saved ----------------------------------------------


def train_a_little(model: nn.Module) -> None:
    """One step, through the original forward."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(make_input()).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def stale_model() -> nn.Module:
    model = make_model()
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    train_a_little(model)
    return model


def test_stale_terms_are_refused_by_load_model_and_made_anew(tmp_path: Path) -> None:
    model = stale_model()
    torch.save(model.state_dict(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"'blocks\.0.* were changed.*convert it again"):
        load_model(tmp_path / "x.pt", arch=make_model, recipes=[TOY])
    done = convert_checkpoint(tmp_path / "x.pt", arch=make_model, recipes=[TOY])
    assert any("3 sites are stale" in note for note in done.notes)
    assert done.output is not None
    unpatch_model(model)
    patch_model(model.eval(), recipes=[TOY])
    loaded = load_model(done.output, arch=make_model, recipes=[TOY])
    assert torch.equal(loaded(make_input()), model(make_input()))


def test_a_training_run_resumes_from_stale_terms_and_never_computes_with_them() -> None:
    model, other = stale_model(), make_model()
    patch_model(other, recipes=[TOY], method="svd", energy=0.9)
    fresh = copy.deepcopy(other)
    other.load_state_dict(model.state_dict())
    with pytest.raises(StaleTermsError):
        other.eval()(make_input())
    assert torch.equal(other.blocks[0]["attn"].table, model.blocks[0]["attn"].table)
    # terms that belong to their weights heal it
    other.load_state_dict(fresh.state_dict())
    assert torch.equal(other(make_input()), fresh.eval()(make_input()))


def test_values_are_compared_when_a_model_in_training_is_saved() -> None:
    model = make_model()
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    key = "blocks.0.attn.score_bias.layout"
    assert model.state_dict()[key].any()
    model.train()
    assert model.state_dict()[key].any()
    table = model.blocks[0]["attn"].table
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(table):
        table.add_(1)  # as a fused optimizer does
    assert not model.state_dict()[key].any()
    assert model.state_dict()["blocks.1.attn.score_bias.layout"].any()


# -- damage --------------------------------------------------------------------------------


TERMS = "blocks.0.attn.score_bias"


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop(next(k for k in s if k.endswith("phi_q"))) is None,
        lambda s: s.update({f"{TERMS}.layout": torch.tensor([1], dtype=torch.uint8)}),
        lambda s: s.update({f"{TERMS}.layout": torch.tensor([-1])}),
        lambda s: s.update({f"{TERMS}.more.table": torch.ones(2)}),
        lambda s: s.update({f"{TERMS}.low_rank.phi_q": torch.ones(2)}),
    ],
)
def test_damaged_terms_are_one_clear_error(tmp_path: Path, damage: Any) -> None:
    model = make_model()
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    state = model.state_dict()
    damage(state)
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn|cannot be used") as caught:
        load_model(tmp_path / "x.safetensors", arch=make_model, recipes=[TOY])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["BloomModel", "BloomForCausalLM"])
def test_a_config_names_the_original_class(tmp_path: Path, kind: str) -> None:
    cls = getattr(transformers, kind)
    model = bloom(cls)
    patch_model(model, force_all=True)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    assert config["architectures"] == [kind]
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "m")) is transformers.BloomModel
    # folders that were saved when patched models had names of their own
    file.write_text(json.dumps(config | {"architectures": [f"FlashBias{kind}"]}))
    assert isinstance(load_model(tmp_path / "m"), cls)

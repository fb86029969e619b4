"""The peft library around models: adapters, and modules that it trains a copy of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.swap import patched_modules
from tests.test_adapters import AS_TERMS, bloom, run, swin, t5

peft = pytest.importorskip("peft")

Made = tuple[nn.Module, dict[str, Any], str]


def wrapped(made: Made, **config: Any) -> tuple[Any, dict[str, Any]]:
    """A model with an adapter on its projections, which changes something, in float64."""
    model, inputs, name = made
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        **{"r": 4, "target_modules": [name], "init_lora_weights": False, **config}
    )
    return peft.get_peft_model(model, settings).double().eval(), inputs


def patched(model: Any, sites: int) -> None:
    plan = patch_model(model, method="exact", force_all=True, backend="eager")
    assert plan.counts() == {"patched": sites}, [(s.name, s.reason) for s in plan.sites]


def outputs(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """With the adapters, and without."""
    on = run(model, inputs)
    with model.disable_adapter():
        return on, run(model, inputs)


@torch.no_grad()
def draw_copies(model: nn.Module, ending: str = "") -> None:
    """Numbers for the modules that are trained as a whole, which begin as those of the model."""
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name and name.endswith(ending):
            parameter.normal_(0.0, 2.0)


def check_both(model: Any, inputs: dict[str, Any], sites: int) -> tuple[Tensor, Tensor]:
    """Patched, a model says what it said with its adapters and without; returns that."""
    before = outputs(model, inputs)
    assert (before[0] - before[1]).abs().max() > 1e-3
    patched(model, sites)
    for found, right in zip(outputs(model, inputs), before, strict=True):
        torch.testing.assert_close(found, right, **AS_TERMS)
    return before


@pytest.mark.parametrize(("make", "sites"), [(swin, 2), (t5, 1), (bloom, 1)])
def test_adapters_on_off_and_merged(make: Callable[[], Made], sites: int) -> None:
    model, inputs = wrapped(make())
    before = check_both(model, inputs, sites)
    merged = copy.deepcopy(model).merge_and_unload()
    assert len(patched_modules(merged)) == sites
    torch.testing.assert_close(run(merged, inputs), before[0], **AS_TERMS)
    unpatch_model(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), before, strict=True))


@pytest.mark.parametrize("part", ["head", "norm1"])
def test_a_head_or_a_norm_that_is_trained_as_a_whole(part: str) -> None:
    model, inputs = wrapped(swin(), modules_to_save=[part])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.3)
    before = outputs(model, inputs)
    patched(model, 2)
    for found, right in zip(outputs(model, inputs), before, strict=True):
        torch.testing.assert_close(found, right, **AS_TERMS)
    # the attention itself is patched, and not what peft has put around its neighbour
    assert {type(m).__name__ for m in patched_modules(model)} == {"FlashBiasWindowAttention"}
    assert "ModulesToSaveWrapper" in repr(model) and "FlashBiasWindowAttention" in repr(model)


def test_attention_that_is_trained_as_a_whole_has_a_bias_of_its_own() -> None:
    """Module and copy are two sites; which of them runs is known in the call."""
    model, inputs, _ = swin()
    settings = peft.LoraConfig(target_modules=["fc1"], modules_to_save=["attn"])
    model = peft.get_peft_model(model, settings).double().eval()
    draw_copies(model, "relative_position_bias_table")
    check_both(model, inputs, 4)


TABLE = "relative_attention_bias"


@pytest.mark.parametrize("config", [{"modules_to_save": [TABLE]}, {"target_modules": ["q", TABLE]}])
def test_a_table_that_is_trained_is_followed_in_each_call(config: dict[str, Any]) -> None:
    """T5 makes its bias anew: that of the copy, or with the adapter, while adapters are on."""
    model, inputs = wrapped(t5(), **config)
    draw_copies(model)
    check_both(model, inputs, 1)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["fc1"], "modules_to_save": ["cpb_mlp"]},
        {"target_modules": ["cpb_mlp.2"]},
    ],
)
def test_trained_layers_of_a_bias_that_is_made_once_are_refused(config: dict[str, Any]) -> None:
    """Terms of SwinV2 are made once: a switch of its `cpb_mlp` would leave no trace."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(
        "swinv2_tiny_window8_256", img_size=16, patch_size=2, embed_dim=16, depths=(1,),
        num_heads=(2,), window_size=4, num_classes=5,
    )  # fmt: skip
    nn.init.ones_(model.layers[0].blocks[0].norm1.weight)  # zero: attention would not matter
    model = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = model(x)
        plan = patch_model(model, method="exact", force_all=True)
        assert plan.counts() == {"unsupported": 1}
        assert "made by layers" in plan.sites[0].reason
        assert torch.equal(model(x), before)

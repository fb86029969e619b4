"""Swin as the backbone of other models of transformers: found, and converted with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case
from tests.recipes.parity import randomise

transformers = pytest.importorskip("transformers")


def swin() -> Any:
    """Windows of 4 on maps of 16, 8, 4 and 2 with an image of 32."""
    return transformers.SwinConfig(
        image_size=64, patch_size=2, embed_dim=8, depths=[2, 1, 1], num_heads=[1, 2, 2],
        window_size=4, out_features=["stage1", "stage2", "stage3"], drop_path_rate=0.0,
    )  # fmt: skip


def upernet() -> Any:
    config = transformers.UperNetConfig(
        backbone_config=swin(), hidden_size=8, num_labels=3, auxiliary_channels=4,
        auxiliary_in_channels=32, pool_scales=[1, 2],
    )  # fmt: skip
    return transformers.UperNetForSemanticSegmentation(config)


def mask2former() -> Any:
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(
            image_size=64, patch_size=2, embed_dim=8, depths=[2, 1, 1, 1], num_heads=[1, 2, 2, 2],
            window_size=4, out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=8,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=8,
        num_queries=3,
    )  # fmt: skip
    return transformers.Mask2FormerModel(config)


def grounding_dino() -> Any:
    config = transformers.GroundingDinoConfig(
        backbone_config=swin(), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2,
        num_queries=3, num_feature_levels=3,
        text_config={
            "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "vocab_size": 99,
        },
    )  # fmt: skip
    return transformers.GroundingDinoModel(config)


MAKE: dict[str, tuple[Callable[[], Any], int]] = {
    "UperNet": (upernet, 4), "Mask2Former": (mask2former, 5), "Grounding DINO": (grounding_dino, 4)
}  # fmt: skip


@pytest.mark.parametrize("name", MAKE)
def test_the_sites_are_those_of_the_backbone(name: str) -> None:
    make, sites = MAKE[name]
    plan = inspect_model(make(), force_all=True)
    assert {site.recipe for site in plan.sites} == {"transformers_swin"}
    assert plan.counts() == {"patched": sites}, [site.reason for site in plan.sites]
    assert all(site.n == site.m == 16 for site in plan.sites)


def pixels(model: Any) -> Tensor:
    made = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return made.to(next(model.parameters()).dtype)


def segmented(model: Any) -> Tensor:
    out: Tensor = model(pixels(model)).logits
    return out


def encoded(model: Any) -> Tensor:
    """What comes of the pixels; the choice of queries is discrete, and may follow rounding."""
    found: Tensor = model(pixels(model)).pixel_decoder_last_hidden_state
    return found


def maps(model: Any) -> Tensor:
    """The backbone in its place; which boxes are looked at further may follow rounding."""
    seen = torch.ones(2, 64, 64, dtype=torch.long)
    found = model.backbone(pixels(model), seen)
    features = found[0] if isinstance(found, tuple) else found
    return torch.cat([feature.flatten() for feature, _ in features])


def detected(model: Any) -> Tensor:
    """All of it, where both models compute the same bits."""
    words = torch.tensor([[5, 6, 7, 8]]).expand(2, -1)
    found: Tensor = model(pixels(model), input_ids=words).last_hidden_state
    return found


RUN = {"UperNet": segmented, "Mask2Former": encoded, "Grounding DINO": maps}
WHOLE = {**RUN, "Grounding DINO": detected}


def drawn(make: Callable[[], Any]) -> Any:
    """A model in eval mode, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        randomise(model)
    return model


def case(name: str, runs: dict[str, Callable[[Any], Tensor]] = RUN) -> Case:
    make, sites = MAKE[name]
    bias = ("relative_position_bias_table",)
    exact = {"method": "exact"}
    return Case(lambda: drawn(make), runs[name], bias, {"patched": sites}, exact)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", MAKE)
def test_the_model_computes_the_same(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(case(name), dtype, backend)


@pytest.mark.parametrize("name", MAKE)
def test_training_is_the_original(name: str) -> None:
    parity.check_training(case(name, WHOLE))


@pytest.mark.parametrize("name", MAKE)
def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    parity.check_folder(case(name, WHOLE), tmp_path)

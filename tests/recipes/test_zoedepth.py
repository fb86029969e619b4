"""ZoeDepth of transformers: the BEiT below it is found and converted with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model
from tests.recipes.model_parity import in_a_folder
from tests.recipes.parity import CHECKS, Case, check_float16, check_state_dict, check_training

transformers = pytest.importorskip("transformers")


def zoedepth() -> Any:
    backbone = transformers.BeitConfig(
        image_size=64, patch_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=32, use_relative_position_bias=True, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.ZoeDepthConfig(
        backbone_config=backbone, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        bottleneck_features=8, num_relative_features=8, hidden_size=32, readout_type="project",
        bin_configurations=[{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0, "name": "nyu"}],
        bin_embedding_dim=16, num_attractors=[2, 2, 2, 2],
    )  # fmt: skip
    return transformers.ZoeDepthForDepthEstimation(config)


def depth(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x).predicted_depth
    return out


CASES = [
    Case(f"ZoeDepth, {height} x {width}", zoedepth, (2, 3, height, width), depth, sites=4)
    for height, width in ((64, 64), (96, 64))
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", (*CHECKS, check_float16))
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", (check_training, check_state_dict))
def test_changes(check: Callable[[Case], None]) -> None:
    check(CASES[0])


def test_a_folder_converts_and_loads(tmp_path: Path) -> None:
    in_a_folder(CASES[0], tmp_path)


@torch.no_grad()
def test_its_depth_is_no_constant() -> None:
    """With the weights that the library draws it is one, whatever the attention computes."""
    found = CASES[0].output(CASES[0].model(), CASES[0].inputs())
    assert found.std() > 0.01 * found.abs().mean() > 0


def test_the_sites_are_those_of_the_backbone() -> None:
    plan = inspect_model(zoedepth(), force_all=True)
    assert {site.recipe for site in plan.sites} == {"transformers_beit"}
    assert plan.counts() == {"patched": 4}

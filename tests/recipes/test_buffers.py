"""Buffers that no checkpoint holds: garbage after a build on the meta device, and never converted.

What a bias is looked up with counts, for every recipe with a small model among the families.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from whole_models import families

CASES = families.cases(tiny=True)
#: those whose bias depends on such buffers
LOOKED_UP = [
    "timm_swinv2", "timm_swin", "timm_beit", "timm_rel_pos", "timm_tiny_vit", "timm_gcvit",
    "timm_levit", "timm_efficientvit", "timm_efficientformer_v2", "timm_swinv2_cr",
    "transformers_levit", "transformers_swin", "transformers_swinv2",
]  # fmt: skip
#: zeros that are added to q, k and v: they make no bias
_OF_PROJECTIONS = ("k_bias",)
pytestmark = pytest.mark.filterwarnings("ignore")


def case_of(recipe: str) -> Any:
    return next(case for name, case in CASES.items() if name.startswith(f"family-{recipe},"))


def statuses(model: nn.Module) -> set[str]:
    sites = inspect_model(model, method="exact", force_all=True).sites
    # EfficientFormer V2 has attention that mixes heads beside what is converted
    return {site.status for site in sites if site.recipe != "timm_talking_heads"}


def left_out_of_checkpoints(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules at or below attention, and names of buffers that a state dict leaves out."""
    found = []
    for site in inspect_model(model, method="exact", force_all=True).patched:
        for module in model.get_submodule(site.name).modules():
            names = module._non_persistent_buffers_set - set(_OF_PROJECTIONS)
            found += [(module, name) for name in sorted(names) if module._buffers[name] is not None]
    return found


def garbage(buffer: Tensor, value: float) -> Tensor:
    """Zeros, or what memory that was never written may hold."""
    if value == 0 or buffer.is_floating_point():
        return torch.full_like(buffer, value)
    return torch.full_like(buffer, torch.iinfo(buffer.dtype).max)


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("recipe", LOOKED_UP)
def test_garbage_in_the_buffers_of_a_bias_is_refused(recipe: str, value: float) -> None:
    model = case_of(recipe).prepare("original", torch.device("cpu"), torch.float32).model
    buffers = left_out_of_checkpoints(model)
    assert buffers and statuses(model) == {"patched"}
    for name in {name for _, name in buffers}:
        right = {module: module._buffers[name] for module, own in buffers if own == name}
        for module, buffer in right.items():
            assert buffer is not None
            module._buffers[name] = garbage(buffer, value)
        assert statuses(model) == {"unsupported"}, name
        for module, buffer in right.items():
            module._buffers[name] = buffer
    assert statuses(model) == {"patched"}


def test_no_other_recipe_depends_on_such_buffers() -> None:
    """A recipe whose bias does so belongs into the list."""
    for name, case in CASES.items():
        if not name.removeprefix("family-").startswith(tuple(f"{r}," for r in LOOKED_UP)):
            ready = case.prepare("original", torch.device("cpu"), torch.float32)
            assert not left_out_of_checkpoints(ready.model), name

"""timm's Swin, patched, against the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, unpatch_model
from flashbias_convert.errors import StaleTermsError
from tests.recipes.parity import CHECKS, ONCE, Case, original
from tests.support import assert_parity

swin = pytest.importorskip("timm.models.swin_transformer")


def make(**changes: Any) -> Any:
    """Windows of 4 on maps of 16 and 8, one of them shifted."""
    arguments: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": (2, 1),
        "num_heads": (2, 4),
        "window_size": 4,
        "num_classes": 5,
    }
    return swin.SwinTransformer(**{**arguments, **changes})


def features(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def case(name: str, size: tuple[int, int] = (32, 32), **changes: Any) -> Case:
    masked = changes.pop("masked", True)
    sites = changes.pop("sites", 3)
    return Case(name, lambda: make(**changes), (2, 3, *size), features, sites, masked)


BASIC = case("square")
CASES = [
    BASIC,
    case("window larger than the map", window_size=24, masked=False),
    case("no multiple of the window", (36, 36), img_size=36, window_size=7),
    case(
        "windows as large as the maps",
        (64, 64),
        img_size=64,
        depths=(1, 2, 1, 1),
        window_size=7,
        num_heads=(2,) * 4,
        patch_size=4,
        sites=5,
    ),
    case("non-square", (32, 48), img_size=(32, 48), window_size=(4, 8)),
    case("always partition", always_partition=True, window_size=12),
    case("no qkv bias", qkv_bias=False),
    case("head size of its own", head_dim=24),
    case("dynamic masks, another size", (48, 40), strict_img_size=False, masked=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(BASIC)


def test_fused_originals_agree() -> None:
    model = BASIC.model()
    for module in model.modules():
        if isinstance(module, swin.WindowAttention):
            module.fused_attn = True
    x = BASIC.inputs()
    plain, truth = BASIC.output(model, x), BASIC.truth(model, x)
    BASIC.patch(model)
    assert_parity(BASIC.output(model, x), plain, truth)


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_of_what_no_longer_runs_are_told(fused: bool) -> None:
    """On probabilities, that is; where timm fuses its attention they do not run there either."""
    model, calls = BASIC.model(), []
    attn = model.layers[0].blocks[1].attn
    attn.fused_attn = fused
    for name in ("attn_drop", "softmax", "proj"):
        getattr(attn, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    BASIC.output(model, BASIC.inputs())
    assert sorted(calls) == (["proj"] if fused else ["attn_drop", "proj", "softmax"])
    calls.clear()
    warnings = [site.warnings for site in BASIC.patch(model).sites]
    assert not warnings[0] and not warnings[2]
    assert "hooks on attn_drop, softmax do not run" in warnings[1][0]
    BASIC.output(model, BASIC.inputs())
    assert calls == ["proj"]


def test_windows_differ_between_blocks_and_short_ones_are_left_alone() -> None:
    (by_map,) = (case for case in CASES if case.name == "windows as large as the maps")
    model = by_map.model()
    assert [(s.n, s.heads) for s in inspect_model(model, force_all=True).sites] == [
        (49, 2), (49, 2), (49, 2), (16, 2), (4, 2),
    ]  # fmt: skip
    shifts = [block.shift_size for layer in model.layers for block in layer.blocks]
    assert shifts == [(0, 0), (0, 0), (3, 3), (0, 0), (0, 0)]
    plan = inspect_model(BASIC.model())
    assert [(s.n, s.heads, s.head_dim) for s in plan.sites] == [(16, 2, 16)] * 2 + [(16, 4, 16)]
    model = make(window_size=3, img_size=24).eval()
    plan = inspect_model(model)
    assert {s.status for s in plan.sites} == {"left alone"}
    assert all("gains little" in s.reason for s in plan.sites)
    assert inspect_model(model, force_all=True).counts() == {"patched": 3}


def test_dynamic_masks_come_with_the_call() -> None:
    model = make(strict_img_size=False).eval()
    plan = inspect_model(model, method="exact")
    assert [s.terms() for s in plan.sites] == [("relative_table",)] * 3
    plan = inspect_model(BASIC.model(), method="exact")
    assert plan.sites[1].terms() == ("relative_table", "regions")


@pytest.mark.parametrize("window", [2, 8])
def test_another_window_is_refused_until_patched_again(window: int) -> None:
    model = BASIC.model()
    BASIC.patch(model)
    model.set_input_size(img_size=(32, 32), window_size=window)
    with pytest.raises(StaleTermsError, match="WindowAttention have changed"):
        BASIC.output(model, BASIC.inputs())
    unpatch_model(model)
    BASIC.patch(model)
    x = BASIC.inputs()
    assert_parity(BASIC.output(model, x), BASIC.output(original(model), x), BASIC.truth(model, x))


def test_the_same_window_on_another_map_needs_no_new_terms() -> None:
    model = BASIC.model()
    BASIC.patch(model)
    model.set_input_size(img_size=(48, 32), window_size=4)
    x = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(1))
    plain, truth = BASIC.output(original(model), x), BASIC.truth(model, x)
    assert_parity(BASIC.output(model, x), plain, truth)


def test_garbage_in_the_index_is_refused() -> None:
    model = BASIC.model()
    model.layers[0].blocks[1].attn.relative_position_index.fill_(4595887523461469503)
    plan = inspect_model(model, method="exact")
    assert [site.status for site in plan.sites] == ["patched", "unsupported", "patched"]
    assert "init_non_persistent_buffers" in plan.sites[1].reason

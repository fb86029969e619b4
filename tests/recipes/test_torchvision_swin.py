"""torchvision's Swin, Swin V2 and Video Swin, patched, against the originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model
from flashbias_convert.swap import patched_modules
from flashbias_convert.window_map import WindowMap
from tests.recipes.parity import CHECKS, ONCE, Case

torchvision = pytest.importorskip("torchvision")
from torchvision.models import swin_transformer as images  # noqa: E402
from torchvision.models.video import swin_transformer as videos  # noqa: E402

TINY: dict[str, Any] = {"embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4], "num_classes": 5}


def make(version: int = 1, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"patch_size": [2, 2], "window_size": [4, 4], **TINY, **changes}
    if version == 2:
        arguments |= {
            "block": images.SwinTransformerBlockV2,
            "downsample_layer": images.PatchMergingV2,
        }
    return images.SwinTransformer(**arguments)


def make_3d(**changes: Any) -> Any:
    arguments = {"patch_size": [2, 2, 2], "window_size": [2, 4, 4], **TINY, **changes}
    return videos.SwinTransformer3d(**arguments)


def features(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.features(x)
    return out


def features_3d(model: Any, x: Tensor) -> Tensor:
    return model.features(model.pos_drop(model.patch_embed(x)))  # type: ignore[no-any-return]


def case(name: str, size: tuple[int, int] = (32, 32), **changes: Any) -> Case:
    masked = changes.pop("masked", True)
    return Case(name, lambda: make(**changes), (2, 3, *size), features, masked=masked)


def video(name: str, size: tuple[int, int, int], **changes: Any) -> Case:
    masked = changes.pop("masked", True)
    return Case(name, lambda: make_3d(**changes), (1, 3, *size), features_3d, masked=masked)


V1, V2 = case("v1"), case("v2", version=2)
V3D = video("3-D", (8, 32, 32))
CASES = [
    V1,
    case("v1, padded", (36, 28), window_size=[7, 7]),
    case("v1, non-square windows", window_size=[2, 8]),
    case("v1, one axis in one window", (8, 32)),
    case("v1, window larger than the map", (8, 8), window_size=[6, 6], masked=False),
    V2,
    case("v2, padded", (36, 28), version=2, window_size=[7, 7]),
    V3D,
    video("3-D, padded", (10, 36, 28), window_size=[2, 7, 7]),
    video("3-D, fewer frames than a window", (4, 32, 32), window_size=[4, 4, 4]),
    video("3-D, map smaller than a window", (8, 8, 24), window_size=[2, 6, 6]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", [V1, V2, V3D], ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    if check.__name__ == "check_compiled":  # its forward is a list of modules
        part = case.model().features[1] if case is not V3D else case.model().features[0]
        size = (1, 16, 16, 32) if case is not V3D else (1, 4, 16, 16, 32)
        case = Case(case.name, lambda: part, size, sites=2)
    check(case)


def test_a_model_without_qkv_bias() -> None:
    def without_bias(version: int) -> nn.Module:
        model = make(version)
        for module in model.modules():
            if isinstance(module, images.ShiftedWindowAttention):
                module.qkv.bias = module.proj.bias = None
        return model  # type: ignore[no-any-return]

    for version in (1, 2):
        case = Case("no bias", lambda v=version: without_bias(v), run=features, masked=True)  # type: ignore[misc]
        CHECKS[0](case)


def test_the_bias_of_keys_is_ignored_by_v2() -> None:
    model = V2.model()
    attn = model.features[1][1].attn
    assert attn.qkv.bias[32:64].abs().max() > 0
    CHECKS[0](V2)


@pytest.mark.parametrize("size", [(8, 16), (6, 5), (12, 3)])
@pytest.mark.parametrize("shift", [(2, 2), (0, 1), (3, 0)])
def test_regions_stand_for_the_original_mask(size: tuple[int, ...], shift: tuple[int, ...]) -> None:
    """As the original finds them: from the attention weights of tokens that are all alike."""
    window = (4, 4)
    grid = WindowMap(size, window, shift)
    x = torch.arange(1.0, 1 + size[0] * size[1]).reshape(1, *size, 1)
    eye = torch.tensor([[0.0], [0.0], [1.0]])
    zeros = torch.zeros(1, 1, 16, 16)
    kept = [0 if w >= p else s for w, p, s in zip(window, grid.padded, shift, strict=True)]
    grid = WindowMap(size, window, tuple(kept))
    theirs = images.shifted_window_attention(
        x, eye, torch.ones(1, 1), zeros, list(window), 1, list(shift), training=False
    )
    values = grid.cut(x)[..., 0]  # (1, nW, 16)
    mask = grid.regions(x.device).dense(16, 16)[:, 0] if grid.rolls else zeros[0]
    ours = grid.join(mask.softmax(-1) @ values[..., None])
    assert torch.allclose(ours, theirs, rtol=1e-5)


def test_cutting_and_joining_are_inverse() -> None:
    grid = WindowMap((3, 9, 10), (2, 4, 5), (1, 2, 0))
    x = torch.randn(2, 3, 9, 10, 6)
    assert grid.cut(x).shape == (2, 12, 40, 6)
    assert torch.equal(grid.join(grid.cut(x)), x)


def test_what_masks_need_is_made_once_per_size() -> None:
    model, x = V1.model(), V1.inputs()
    V1.patch(model)
    shifted = patched_modules(model)[1].score_bias
    with torch.inference_mode():
        V1.output(model, x)
    first = shifted._last_joined
    V1.output(model, x)
    assert first is not None and shifted._last_joined is first
    V1.output(model, torch.randn(1, 3, 40, 32))
    assert shifted._last_joined is not first


def test_terms_are_planned_for_whole_windows() -> None:
    plan = inspect_model(V3D.model(), method="exact")
    assert [(site.n, site.terms()) for site in plan.sites] == [(32, ("relative_table",))] * 3


def test_short_windows_are_left_alone() -> None:
    plan = inspect_model(make(window_size=[3, 3]).eval())
    assert plan.counts() == {"left alone": 3}
    assert all("gains little" in site.reason for site in plan.sites)

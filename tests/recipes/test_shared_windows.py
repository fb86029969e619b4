"""Which windows share their bias: those without a mask, also none that comes with a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashbias_convert import inspect_model
from flashbias_convert.inspection import planning

timm = pytest.importorskip("timm")
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (2, 2),
                         "num_heads": (2, 2), "window_size": 4, "num_classes": 3}  # fmt: skip


def shared(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What is said of each site, in their order."""
    seen: list[bool] = []
    decompose = planning.decompose

    def looked_at(*given: Any, **options: Any) -> Any:
        seen.append(options["shared"])
        return decompose(*given, **options)

    monkeypatch.setattr(planning, "decompose", looked_at)
    plan = inspect_model(model, method="exact", force_all=True)
    assert len(seen) == len(plan.patched) > 0
    return seen


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_that_are_not_shifted(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"strict_img_size": False} if dynamic else {}  # then a mask comes with each call
    model = timm.models.swin_transformer.SwinTransformer(**SIZES, **more).eval()
    assert model.layers[0].blocks[1].dynamic_mask == dynamic
    assert shared(model, monkeypatch) == [True, False, True, False]


def test_cosines_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.models.swin_transformer_v2.SwinTransformerV2(**SIZES).eval()
    assert shared(model, monkeypatch) == [False] * 4


def test_swin_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    model = transformers.SwinModel(config).eval()
    assert shared(model, monkeypatch) == [True, False, True, False]


@pytest.mark.parametrize("shift", [[0, 0], [2, 2], [0, 2]])
@pytest.mark.parametrize("cosine", [False, True])
def test_windows_of_torchvision(
    shift: list[int], cosine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map of one window rolls nothing, but a larger one may come."""
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    kind = swin.ShiftedWindowAttentionV2 if cosine else swin.ShiftedWindowAttention
    layer = torch.nn.Sequential(kind(8, [4, 4], shift, 2)).eval()
    assert shared(layer, monkeypatch) == [not cosine and shift == [0, 0]]


def test_windows_of_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    swin = pytest.importorskip("torchvision.models.video.swin_transformer")
    sizes = ([2, 2, 2], [0, 0, 0]), ([2, 2, 2], [0, 1, 1])
    layers = [swin.ShiftedWindowAttention3d(8, *size, 2) for size in sizes]
    assert shared(torch.nn.Sequential(*layers).eval(), monkeypatch) == [True, False]


def test_windows_of_monai(monkeypatch: pytest.MonkeyPatch) -> None:
    swin = pytest.importorskip("monai.networks.nets.swin_unetr")
    blocks = [swin.SwinTransformerBlock(8, 2, (2, 2, 2), shift) for shift in [(0, 0, 0), (1, 1, 1)]]
    assert shared(torch.nn.Sequential(*blocks).eval(), monkeypatch) == [True, False]


def test_windows_and_grids_of_maxvit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of timm and torchvision; attention over a whole map is no window."""
    maxvit = pytest.importorskip("torchvision.models.maxvit")
    sizes: dict[str, Any] = {"input_size": (32, 32), "stem_channels": 8, "partition_size": 4,
                             "block_channels": [16], "block_layers": [1], "head_dim": 8,
                             "stochastic_depth_prob": 0.0}  # fmt: skip
    assert shared(maxvit.MaxVit(**sizes).eval(), monkeypatch) == [True, True]
    small: dict[str, Any] = {"img_size": 64, "embed_dim": (32,) * 4, "depths": (1,) * 4,
                             "stem_width": 16}  # fmt: skip
    model = timm.create_model("maxvit_tiny_tf_224", **small).eval()
    assert shared(model, monkeypatch) == [True] * 8
    assert shared(timm.create_model("coatnet_1_rw_224", **small).eval(), monkeypatch) == [False] * 2


def test_windows_that_are_never_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """GCViT, TinyViT and EfficientViT."""
    from timm.models.gcvit import GlobalContextVit
    from timm.models.tiny_vit import TinyVit

    few: dict[str, Any] = {"depths": (2, 1), "num_heads": (2, 2), "img_size": 32}
    model = GlobalContextVit(window_size=(2, 2), embed_dim=16, **few).eval()
    assert shared(model, monkeypatch) == [True] * 3
    sizes = {"embed_dims": (16, 32, 32, 32), "depths": (1,) * 4, "num_heads": (1, 2, 2, 2)}
    model = TinyVit(window_sizes=(4, 4, 4, 2), **sizes).eval()
    assert shared(model, monkeypatch) == [True] * 3
    from tests.recipes.test_small_tables import CASCADED

    assert shared(CASCADED.model(), monkeypatch) == [True] * 3

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

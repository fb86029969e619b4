"""Swin V2 CR and GCViT of timm, patched, against the originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import composed, inspect_model, unpatch_model
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.recipes.timm_gcvit import queries_by_image
from tests.recipes.parity import CHECKS, ONCE, Case, check_compiled, check_float32, original
from tests.timm_abilities import CUTS_ANY_MAP, needs, works

cr = pytest.importorskip("timm.models.swin_transformer_v2_cr")
gc = pytest.importorskip("timm.models.gcvit")


def make_cr(**changes: Any) -> Any:
    """Windows of 4 on maps of 16 and 8, one of them shifted."""
    arguments: dict[str, Any] = {
        "img_size": 32, "patch_size": 2, "embed_dim": 32, "depths": (2, 1), "num_heads": (2, 4),
        "window_size": 4, "num_classes": 5,
    }  # fmt: skip
    return cr.SwinTransformerV2Cr(**{**arguments, **changes})


def make_gc(**changes: Any) -> Any:
    """Windows of 4 on maps of 8 and 4; every other block has queries of the whole image."""
    arguments: dict[str, Any] = {
        "img_size": 32, "window_ratio": (8, 8), "embed_dim": 16, "depths": (2, 2),
        "num_heads": (2, 4), "window_size": 4, "num_classes": 5, "layer_scale": 0.1,
    }  # fmt: skip
    return gc.GlobalContextVit(**{**arguments, **changes})


def features(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def case_cr(name: str, size: tuple[int, int] = (32, 32), **changes: Any) -> Case:
    masked = changes.pop("masked", True)
    # its errors are largest in a few places, so it takes some images to meet them
    return Case(name, lambda: make_cr(**changes), (6, 3, *size), features, masked=masked)


def case_gc(name: str, **changes: Any) -> Case:
    return Case(name, lambda: make_gc(**changes), (2, 3, 32, 32), features, sites=4)


CR, GC = case_cr("CR"), case_gc("GCViT")
PADDED = case_cr("CR, no multiple of the window", (36, 36), img_size=36, window_size=7)
CASES = [
    CR,
    PADDED,
    case_cr("CR, non-square", (32, 48), img_size=(32, 48), window_size=(4, 8)),
    case_cr("CR, dynamic masks, another size", (48, 40), strict_img_size=False, masked=False),
    case_cr("CR, more norms", extra_norm_period=1, extra_norm_stage=True),
    GC,
    case_gc("GCViT without qkv bias", qkv_bias=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    if case is PADDED:
        needs(works(case.make), CUTS_ANY_MAP)
    check(case)


@pytest.mark.parametrize("case", [CR, GC], ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", [CR, GC], ids=str)
def test_every_bias_is_a_table(case: Case) -> None:
    plan = inspect_model(case.model(), method="exact")
    assert {site.terms()[0] for site in plan.sites} == {"relative_table"}


def test_an_attention_compiles_into_one_graph() -> None:
    """Those of whole models are slow to trace."""
    attention = cr.WindowMultiHeadAttention(32, 2, window_size=(4, 4))
    check_compiled(Case("CR", lambda: attention, (2, 16, 32), sites=1))
    attention = gc.WindowAttentionGlobal(32, 2, window_size=(4, 4))
    queries = torch.randn(2, 4, 4, 32)
    check_compiled(Case("GC", lambda: attention, (4, 16, 32), lambda m, x: m(x, queries), sites=1))


@pytest.mark.parametrize("by_image", [True, False])
def test_queries_of_images_go_where_the_original_puts_them(
    by_image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the windows of their image, or in turn, as in versions of timm before 1.0.31."""
    forward = gc.WindowAttentionGlobal.forward

    def spread(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        if q_global is not None:  # a row for each window: none is left to the library
            times = len(x) // len(q_global)
            by, turns = q_global.repeat_interleave(times, 0), q_global.repeat(times, 1, 1, 1)
            q_global = by if by_image else turns
        out: Tensor = forward(self, x, q_global)
        return out

    monkeypatch.setattr(gc.WindowAttentionGlobal, "forward", spread)
    monkeypatch.setattr(composed, "_COMPOSED", {})  # it asks when the class is made
    queries_by_image.cache_clear()
    try:
        assert queries_by_image() == by_image
        check_float32(GC)
    finally:
        queries_by_image.cache_clear()


@pytest.mark.parametrize("window", [(6, 4), (2, 8)])
def test_another_input_size_is_refused_until_patched_again(window: tuple[int, int]) -> None:
    def resize(model: Any) -> None:
        model.set_input_size((48, 32), window_size=window)

    needs(works(lambda: resize(CR.model())), "set_window_size for more tokens or fewer")
    model = CR.model()
    CR.patch(model)
    resize(model)
    x = torch.randn(6, 3, 48, 32)
    with pytest.raises(StaleTermsError):
        CR.output(model, x)
    unpatch_model(model)
    CR.patch(model)
    CR.agrees(model, x)


def test_dropout_of_the_hidden_layer_means_the_original() -> None:
    model, x = CR.model(), CR.inputs()
    CR.patch(model)
    reference = original(model)
    for each in (model, reference):
        for module in each.modules():
            if isinstance(module, nn.Dropout):
                module.train()
    outputs = []
    for each in (model, reference):
        torch.manual_seed(7)
        outputs.append(CR.output(each, x))
    assert torch.equal(*outputs)

"""CoAtNet, MaxViT, vit_relpos and TinyViT of timm, patched, against the originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, unpatch_model
from flashbias_convert.errors import StaleTermsError
from tests.recipes.parity import CHECKS, ONCE, Case, check_compiled, original
from tests.support import assert_parity
from tests.timm_abilities import RESIZES, needs

maxxvit = pytest.importorskip("timm.models.maxxvit")
relpos = pytest.importorskip("timm.models.vision_transformer_relpos")
tiny_vit = pytest.importorskip("timm.models.tiny_vit")


def coatnet(blocks: tuple[str, ...] = ("T", "T"), **transformer: Any) -> nn.Module:
    settings = {"dim_head": 16, "rel_pos_dim": 24, **transformer}
    config = maxxvit.MaxxVitCfg(
        embed_dim=(32, 32), depths=(1, 2), block_type=blocks, stem_width=16,
        transformer_cfg=maxxvit.MaxxVitTransformerCfg(**settings),
    )  # fmt: skip
    return maxxvit.MaxxVit(config, img_size=32, num_classes=5)  # type: ignore[no-any-return]


def maxvit(**transformer: Any) -> nn.Module:
    return coatnet(("M", "M"), **{"window_size": (4, 4), **transformer})


def vit(**changes: Any) -> nn.Module:
    arguments: dict[str, Any] = {
        "img_size": 20, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
        "rel_pos_dim": 24, "num_classes": 5, "init_values": 0.1,
    }  # fmt: skip
    return relpos.VisionTransformerRelPos(**{**arguments, **changes})  # type: ignore[no-any-return]


def tiny(**changes: Any) -> nn.Module:
    arguments: dict[str, Any] = {
        "embed_dims": (16, 32, 32, 32), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2),
        "window_sizes": (4, 4, 3, 2), "num_classes": 5, "drop_path_rate": 0.0,
    }  # fmt: skip
    return tiny_vit.TinyVit(**{**arguments, **changes})  # type: ignore[no-any-return]


def features(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def case(name: str, make: Callable[..., nn.Module], size: int = 32, **changes: Any) -> Case:
    sites = changes.pop("sites", 3)
    return Case(name, lambda: make(**changes), (2, 3, size, size), features, sites)


COATNET = case("CoAtNet", coatnet)
MAXVIT = case("MaxViT", maxvit, sites=6)
TINY = case("TinyViT", tiny, 64, sites=4)
CASES = [
    COATNET,
    case("CoAtNet with an MLP", coatnet, rel_pos_type="mlp"),
    case("CoAtNet, heads last", coatnet, head_first=False, rel_pos_type="bias_tf"),
    MAXVIT,
    case("MaxViT of TensorFlow", maxvit, sites=6, rel_pos_type="bias_tf", head_first=False),
    case("MaxViT in NCHW", maxvit, sites=6, rel_pos_type="mlp", use_nchw_attn=True),
    case("vit_relpos", vit, 20, sites=2),
    case("vit_relpos with a table", vit, 20, sites=2, rel_pos_type="bias", class_token=True),
    case("vit_relpos with a class token", vit, 20, sites=2, class_token=True, qk_norm=True),
    case("vit_relpos as in Swin V2", vit, 20, sites=2, rel_pos_type="mlp_swin", qkv_bias=False),
    TINY,
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[6], TINY], ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_an_attention_compiles_into_one_graph() -> None:
    check_compiled(
        Case("vit", lambda: vit().blocks[0].attn, (2, 25, 32), sites=1)  # type: ignore[index, union-attr]
    )
    check_compiled(
        Case("TinyViT", lambda: TINY.make().stages[1].blocks[0].attn, (2, 16, 32), sites=1)  # type: ignore[index, union-attr]
    )


@pytest.mark.parametrize("fused", [False, True])
def test_originals_agree_fused_or_not(fused: bool) -> None:
    for case in (COATNET, MAXVIT, TINY):
        model, x = case.model(), case.inputs()
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        plain, truth = case.output(model, x), case.truth(model, x)
        case.patch(model)
        assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(model, x))


def test_every_kind_of_bias_is_a_table() -> None:
    for case in CASES:
        plan = inspect_model(case.model(), method="exact")
        assert {site.terms() for site in plan.sites} == {("relative_table",)}, case


def test_values_may_be_wider_than_keys() -> None:
    attention = tiny_vit.Attention(32, key_dim=8, num_heads=2, attn_ratio=3, resolution=(4, 5))
    case = Case("wide", lambda: attention, (8, 20, 32), sites=1)
    CHECKS[0](case)


def test_the_cache_of_tiny_vit_is_not_trusted() -> None:
    model, x = TINY.model(), TINY.inputs()
    TINY.output(model, x)  # fills it
    nn.init.normal_(model.stages[1].blocks[0].attn.attention_biases)
    fresh = original(model)
    fresh.train().eval()  # clears it
    TINY.patch(model)
    plain, truth = TINY.output(fresh, x), TINY.truth(model, x)
    assert_parity(TINY.output(model, x), plain, truth, nearby=TINY.nearby(fresh, x))


def test_training_mode_returns_the_module() -> None:
    model = TINY.model()
    TINY.patch(model)
    attention = model.stages[1].blocks[0].attn
    assert attention.train() is attention


def test_another_image_size_is_refused_until_patched_again() -> None:
    for case in (COATNET, CASES[1], CASES[4]):
        model = case.model()
        needs(hasattr(model, "set_input_size"), RESIZES)
        case.patch(model)
        model.set_input_size((64, 32))
        x = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(1))
        if model.stages[0].blocks[0].__class__.__name__ == "TransformerBlock2d":
            with pytest.raises(StaleTermsError):
                case.output(model, x)
        unpatch_model(model)
        plain, truth = case.output(model, x), case.truth(model, x)
        case.patch(model)
        assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(model, x))


def test_without_relative_positions_it_is_left_alone() -> None:
    plan = inspect_model(coatnet(rel_pos_type="none").eval(), method="exact")
    assert {site.reason for site in plan.sites} == {"it has no relative positions"}


@pytest.mark.parametrize("case", [COATNET, CASES[1], CASES[2], TINY], ids=str)
def test_garbage_in_the_buffers_is_refused(case: Case) -> None:
    model = case.model()
    for name, buffer in model.named_buffers():
        if any(part in name for part in ("index", "idxs", "_lookup", "coords")):
            buffer.zero_()
    plan = inspect_model(model, method="exact")
    assert plan.counts() == {"unsupported": case.sites}


def test_short_windows_are_left_alone() -> None:
    plan = inspect_model(TINY.model())
    assert [site.n for site in plan.sites] == [16, 16, 9, 4]
    assert [site.status for site in plan.sites] == ["patched"] * 2 + ["left alone"] * 2
    assert "gains little" in plan.sites[2].reason


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_measured_to_gain_nothing_is_left_alone(shared: bool) -> None:
    def status(side: int, heads: int, **options: Any) -> set[tuple[str, str]]:
        model = vit(img_size=4 * side, embed_dim=64, num_heads=heads, shared_rel_pos=shared)
        sites = inspect_model(model, **options).sites
        return {(site.status, site.reason.partition(":")[0]) for site in sites}

    assert status(14, 1) == {("left alone", "196 tokens and heads of 64")}
    assert status(15, 1) == {("left alone", "225 tokens and heads of 64")}
    patched = [
        status(14, 1, force_all=True), status(14, 1, method="exact"),
        status(17, 1),  # more tokens
        status(14, 2),  # narrower heads
    ]  # fmt: skip
    assert {state for found in patched for state, _ in found} == {"patched"}

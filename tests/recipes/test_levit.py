"""LeViT of timm and of transformers, patched, against the originals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, load_model, save_model
from flashbias_convert.swap import patched_modules
from tests.recipes import model_parity
from tests.recipes.parity import CHECKS, ONCE, Case, check_compiled, original
from tests.support import assert_parity

levit = pytest.importorskip("timm.models.levit")
transformers = pytest.importorskip("transformers")

#: maps of 4 x 4, then 2 x 2
SMALL: dict[str, Any] = {
    "img_size": 64, "embed_dim": (32, 48), "key_dim": 8, "depth": (2, 1), "num_heads": (2, 3),
    "attn_ratio": 2.0, "num_classes": 5, "drop_path_rate": 0.0,
}  # fmt: skip
#: maps of 4 x 4, 2 x 2 and 1 x 1
COPY: dict[str, Any] = {
    "image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4],
    "depths": [2, 1, 1], "key_dim": [8, 8, 8],
}  # fmt: skip


def small(**changes: Any) -> nn.Module:
    return levit.Levit(**{**SMALL, **changes})  # type: ignore[no-any-return]


def copy(**changes: Any) -> nn.Module:
    config = transformers.LevitConfig(**{**COPY, **changes})
    return transformers.LevitModel(config)  # type: ignore[no-any-return]


def features(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def last(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).last_hidden_state
    return out


def case(name: str, size: tuple[int, int] = (64, 64), sites: int = 4, **changes: Any) -> Case:
    return Case(name, lambda: small(**changes), (2, 3, *size), features, sites)


LINEAR = case("timm")
CONV = case("timm, convolutions", use_conv=True)
COPIED = Case("transformers", copy, (2, 3, 64, 64), last, 6)
CASES = [
    LINEAR,
    CONV,
    case("timm, no square", (80, 112), img_size=(80, 112)),
    case("timm, no square, convolutions", (80, 112), img_size=(80, 112), use_conv=True),
    case("timm, values as wide as keys", attn_ratio=1.0),
    COPIED,
    Case("transformers, an odd map", lambda: copy(image_size=80), (2, 3, 80, 80), last, 6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", [LINEAR, CONV, COPIED], ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def downsample(use_conv: bool, **changes: Any) -> Case:
    """Attention from every second, or third, row and column of a map of 5 x 8 to all of it."""
    settings = {"key_dim": 8, "num_heads": 2, "resolution": (5, 8), "use_conv": use_conv, **changes}
    size = (2, 32, 5, 8) if use_conv else (2, 40, 32)
    return Case("downsample", lambda: levit.AttentionDownsample(32, 48, **settings), size, sites=1)


@pytest.mark.parametrize("use_conv", [False, True])
@pytest.mark.parametrize("changes", [{}, {"use_pool": True}, {"stride": 3}, {"attn_ratio": 1}])
@pytest.mark.parametrize("check", CHECKS[:3])
def test_downsampling(
    use_conv: bool, changes: dict[str, Any], check: Callable[[Case], None]
) -> None:
    check(downsample(use_conv, **changes))


def test_attentions_compile_into_one_graph() -> None:
    check_compiled(downsample(False))
    check_compiled(downsample(True))


def test_maps_whose_channels_come_last() -> None:
    model, x = CONV.model(), CONV.inputs().to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    plain, truth = CONV.output(model, x), CONV.truth(model, x)
    CONV.patch(model)
    assert_parity(CONV.output(model, x), plain, truth, nearby=CONV.nearby(model, x))


@pytest.mark.parametrize("use_conv", [False, True])
def test_heads_are_views_of_the_projections(
    use_conv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbias_convert.modules import ScoreBiasModule

    made: set[int] = set()
    met: list[int] = []

    def remember(_: nn.Module, __: Any, out: Tensor) -> None:
        made.add(out.untyped_storage().data_ptr())

    run = ScoreBiasModule.forward

    def look(self: ScoreBiasModule, *args: Tensor, **kwargs: Any) -> Tensor:
        met.extend(t.untyped_storage().data_ptr() for t in args[:3])
        return run(self, *args, **kwargs)

    case = CONV if use_conv else LINEAR
    model, x = case.model(), case.inputs()
    case.patch(model)
    for attention in patched_modules(model):
        for name in ("qkv", "kv", "q"):
            if name in attention._modules:
                attention.get_submodule(name).register_forward_hook(remember)
    monkeypatch.setattr(ScoreBiasModule, "forward", look)
    case.output(model, x)
    assert len(met) == 3 * case.sites and made.issuperset(met)


def test_every_bias_is_a_table_and_as_large_as_its_maps() -> None:
    for case in CASES:
        sites = inspect_model(case.model(), method="exact").sites
        kinds = {site.terms() for site in sites if site.n * site.m > 4}
        assert kinds == {("relative_table",)}, case
    sizes = [(s.n, s.m, s.head_dim) for s in inspect_model(CASES[3].model(), method="exact").sites]
    assert sizes == [(35, 35, 8), (35, 35, 8), (12, 35, 8), (12, 12, 8)]


def test_other_strides_are_no_table() -> None:
    (site,) = inspect_model(downsample(False, stride=3).model(), method="exact").sites
    assert "relative_table" not in site.terms()


def test_the_published_sizes_are_all_converted() -> None:
    """From 196 tokens down to 16, with the downsampling between them."""
    model = levit.levit_384()
    for name, parameter in model.named_parameters():
        if "attention_biases" in name:
            nn.init.normal_(parameter)
    plan = inspect_model(model.eval())
    assert plan.counts() == {"patched": 14}
    sizes = {(site.n, site.m) for site in plan.sites}
    assert sizes == {(196, 196), (49, 196), (49, 49), (16, 49), (16, 16)}
    assert all(site.is_exact() for site in plan.sites if site.m == 196)


@pytest.mark.parametrize("case", [LINEAR, CONV, COPIED], ids=str)
def test_the_cache_is_not_trusted(case: Case) -> None:
    model, x = case.model(), case.inputs()
    case.output(model, x)  # fills it
    for name, parameter in model.named_parameters():
        if "attention_biases" in name:
            nn.init.normal_(parameter)
    fresh = original(model)
    fresh.train()  # clears it
    fresh.eval()
    case.patch(model)
    plain, truth = case.output(fresh, x), case.truth(model, x)
    assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(fresh, x))


@pytest.mark.parametrize("case", [LINEAR, COPIED], ids=str)
def test_training_mode_returns_the_module(case: Case) -> None:
    model = case.model()
    case.patch(model)
    for attention in patched_modules(model):
        assert attention.train() is attention


@pytest.mark.parametrize("case", [LINEAR, CONV, COPIED], ids=str)
def test_saved_and_loaded_it_is_the_same(case: Case, tmp_path: Path) -> None:
    model, x = case.model(), case.inputs()
    plan = case.patch(model)
    save_model(model, tmp_path / "model.safetensors", arch=case.make, plan=plan)
    loaded = load_model(tmp_path / "model.safetensors", arch=case.make, backend="sdpa")
    assert len(patched_modules(loaded)) == case.sites
    assert torch.equal(case.output(loaded, x), case.output(model, x))


@pytest.mark.parametrize("case", [LINEAR, CONV, COPIED], ids=str)
def test_garbage_in_the_index_is_refused(case: Case) -> None:
    model = case.model()
    for name, buffer in model.named_buffers():
        if name.endswith("attention_bias_idxs"):
            buffer.zero_()
    right = 1 if case is COPIED else 0  # the index of a map of one token is zero
    sites = inspect_model(model, method="exact").sites
    refused = [site for site in sites if site.status == "unsupported"]
    assert len(refused) == case.sites - right
    assert all("buffers" in site.reason for site in refused)


def test_maps_of_another_size_are_refused() -> None:
    """As by the original, whose bias has one size."""
    model = CONV.model()
    CONV.patch(model)
    with pytest.raises(ValueError, match="for 16 queries, the call has 24"):
        CONV.output(model, torch.randn(2, 3, 64, 96))


def test_a_folder_of_transformers_converts_and_loads(tmp_path: Path) -> None:
    case = model_parity.Case(
        COPIED.model, lambda model: last(model, COPIED.inputs()), ("attention_biases",),
        {"patched": COPIED.sites}, {"method": "exact"},
    )  # fmt: skip
    model_parity.check_folder(case, tmp_path)

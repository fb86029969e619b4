"""EfficientViT (MSRA), EfficientFormer and the downsampling of its second version, all of timm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import calibrate_model, inspect_model, load_model, patch_model, save_model
from flashbias_convert.benchmark.calls import attending
from flashbias_convert.benchmark.stand_ins import dense_sdpa
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.patching import freeze_terms
from flashbias_convert.swap import patched_modules
from tests.recipes.parity import CHECKS, ONCE, Case, check_compiled, original
from tests.support import assert_parity

msra = pytest.importorskip("timm.models.efficientvit_msra")
former = pytest.importorskip("timm.models.efficientformer")
second = pytest.importorskip("timm.models.efficientformer_v2")

#: maps of 4 x 4 in windows of 3, with padding, then 2 x 2 in one window
CASCADE: dict[str, Any] = {
    "img_size": 64, "embed_dim": (32, 48), "key_dim": (8, 8), "depth": (1, 2), "num_heads": (2, 3),
    "window_size": (3, 3), "kernels": (5, 3, 1), "down_ops": (("", 1), ("subsample", 2)),
    "num_classes": 5,
}  # fmt: skip
#: its map has 7 x 7 tokens, whatever else is said
SMALL: dict[str, Any] = {
    "depths": (1, 1, 1, 2), "embed_dims": (8, 8, 16, 16), "num_vit": 2, "num_classes": 3
}  # fmt: skip
SECOND: dict[str, Any] = {
    "depths": (1, 1, 2, 2), "embed_dims": (8, 8, 16, 16), "num_vit": 1, "num_classes": 3,
    "img_size": 64,
}  # fmt: skip


def features(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def cascade(name: str, size: int = 64, **changes: Any) -> Case:
    settings = {**CASCADE, "img_size": size, **changes}
    return Case(name, lambda: msra.EfficientVitMsra(**settings), (2, 3, size, size), features, 3)


def alone(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In a network: the attentions themselves return nothing from `eval`."""
    return lambda: nn.Sequential(make())


def group(**changes: Any) -> Case:
    """One attention, of windows of 4 x 4."""
    settings = {"key_dim": 8, "num_heads": 3, "attn_ratio": 2, "resolution": 4, **changes}
    width = settings["num_heads"] * int(settings["attn_ratio"] * settings["key_dim"])
    side = settings["resolution"]
    return Case(
        "group",
        alone(lambda: msra.CascadedGroupAttention(width, kernels=(5, 3, 3, 3), **settings)),
        (5, width, side, side), sites=1,
    )  # fmt: skip


def downsample(**changes: Any) -> Case:
    """Attention from every second row and column of a map of 5 x 8 to all of it."""
    settings = {"key_dim": 8, "num_heads": 2, "resolution": (5, 8), "out_dim": 24, **changes}
    return Case(
        "downsample", alone(lambda: second.Attention2dDownsample(16, **settings)),
        (2, 16, *settings["resolution"]), sites=1,
    )  # fmt: skip


def layer(**changes: Any) -> Case:
    """Attention over a map that is no square."""
    settings = {"key_dim": 8, "num_heads": 2, "attn_ratio": 1.5, "resolution": (3, 5), **changes}
    return Case("layer", alone(lambda: former.Attention(16, **settings)), (2, 15, 16), sites=1)


CASCADED = cascade("EfficientViT")
FORMER = Case(
    "EfficientFormer", lambda: former.EfficientFormer(**SMALL), (2, 3, 224, 224), features, 2
)
DOWN = downsample()
CASES = [CASCADED, cascade("EfficientViT, odd maps", 80, window_size=(4, 2)), group(),
         group(num_heads=1), group(attn_ratio=1), FORMER, layer(), layer(resolution=(15, 1)), DOWN,
         downsample(attn_ratio=1, resolution=(4, 4))]  # fmt: skip
FEW = [CASCADED, group(), FORMER, DOWN]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS[:3])
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_lone_attentions_compile_into_one_graph() -> None:
    check_compiled(layer())


@pytest.mark.parametrize("case", [CASCADED, DOWN], ids=str)
def test_maps_whose_channels_come_last(case: Case) -> None:
    model, x = case.model(), case.inputs().to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    plain, truth = case.output(model, x), case.truth(model, x)
    case.patch(model)
    assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(model, x))


@pytest.mark.parametrize("case", FEW, ids=str)
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


@pytest.mark.parametrize("case", FEW, ids=str)
def test_training_mode_returns_the_module(case: Case) -> None:
    model = case.model()
    case.patch(model)
    for attention in patched_modules(model):
        assert attention.train() is attention


@pytest.mark.parametrize("case", FEW, ids=str)
def test_saved_and_loaded_it_is_the_same(case: Case, tmp_path: Path) -> None:
    model, x = case.model(), case.inputs()
    plan = case.patch(model)
    save_model(model, tmp_path / "model.safetensors", arch=case.make, plan=plan)
    loaded = load_model(tmp_path / "model.safetensors", arch=case.make, backend="sdpa")
    assert len(patched_modules(loaded)) == case.sites
    assert torch.equal(case.output(loaded, x), case.output(model, x))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_garbage_in_the_index_is_refused(case: Case) -> None:
    model = case.model()
    for name, buffer in model.named_buffers():
        if name.endswith("attention_bias_idxs"):
            buffer.zero_()
    sites = inspect_model(model, method="exact").sites
    refused = [site for site in sites if site.status == "unsupported"]
    assert len(refused) == case.sites > 0
    assert all("buffers" in site.reason for site in refused)


@pytest.mark.parametrize("case", [group(), DOWN], ids=str)
def test_maps_of_another_size_are_refused(case: Case) -> None:
    """As by the originals, whose bias has one size."""
    model = case.model()
    case.patch(model)
    batch, channels, height, width = case.size
    with pytest.raises(ValueError, match="queries, the call has"):
        case.output(model, torch.randn(batch, channels, height + 2, width))


@pytest.mark.parametrize("case", [*CASES[2:5], *CASES[6:]], ids=str)
def test_every_bias_is_a_table(case: Case) -> None:
    (site,) = inspect_model(case.model(), method="exact").sites
    assert site.terms() == ("relative_table",)


# -- what is converted -----------------------------------------------------------------------


def published(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    for key, parameter in model.named_parameters():
        if "attention_biases" in key:
            nn.init.normal_(parameter)
    return model.eval()


def test_the_published_sizes_are_converted() -> None:
    """By default, with windows of 7 x 7 down to 4 x 4."""
    plan = inspect_model(published("efficientvit_m0"))
    assert plan.counts() == {"patched": 6}
    assert [(s.n, s.m, s.heads, s.head_dim) for s in plan.sites] == [
        (49, 49, 4, 16), *[(49, 49, 4, 16)] * 2, *[(16, 16, 4, 16)] * 3
    ]  # fmt: skip
    plan = inspect_model(published("efficientformer_l1"))
    assert plan.counts() == {"patched": 1}
    assert [(s.n, s.m, s.heads, s.head_dim) for s in plan.sites] == [(49, 49, 8, 32)]


def test_only_the_downsampling_of_the_second_version_is_converted() -> None:
    """Its other attention mixes heads; beside it the model computes what it did."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = Case("second", lambda: second.EfficientFormerV2(**SECOND), (2, 3, 64, 64), features)
        model, x = case.model(), case.inputs()
    plain, truth = case.output(model, x), case.truth(model, x)
    plan = patch_model(model, method="exact", force_all=True, backend="sdpa")
    assert plan.counts() == {"patched": 1, "unsupported": 2}
    assert all("mixes its heads" in s.reason for s in plan.sites if s.status == "unsupported")
    assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(model, x))
    (site,) = inspect_model(published("efficientformerv2_s0")).patched
    assert (site.n, site.m, site.heads, site.head_dim) == (49, 196, 8, 16)


# -- heads that wait for each other ------------------------------------------------------------


def test_another_window_is_noticed() -> None:
    case = CASCADED
    model, x = case.model(), case.inputs()
    case.patch(model)
    if not hasattr(model, "set_input_size"):
        pytest.skip("older versions of timm cannot change it")
    model.set_input_size(32)  # windows of 2 x 2, whose tables are resized
    with pytest.raises(StaleTermsError):
        case.output(model, x)


def test_forms_of_heads_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = group()
    model, x = case.model(), case.inputs()
    case.patch(model)
    made: list[Any] = []
    prepare = ScoreBiasModule._prepare

    def count(self: ScoreBiasModule, *part: Any) -> Any:
        made.append(part)
        return prepare(self, *part)

    monkeypatch.setattr(ScoreBiasModule, "_prepare", count)
    case.output(model, x)
    case.output(model, x)
    assert not made  # all of them while it was patched
    model.double()
    assert {heads for _, heads in made} == {None, (0,), (1,), (2,)}
    before = len(made)
    case.output(model, x.double())
    assert len(made) == before


def test_heads_that_took_different_terms() -> None:
    """One without a bias, one of low rank, one that is a table."""
    case = group(resolution=7)
    model, x = case.model(), case.inputs()
    table = model[0].attention_biases.detach()
    table[0] = 3.0
    at = torch.arange(7.0)
    table[1] = 0.1 * (at[:, None].square() - at.square()).flatten()  # squares of distances
    whole = case.model()
    whole[0].attention_biases.data.copy_(table)
    case.patch(whole)
    plan = case.patch(model, method="svd", energy=0.999, max_attention_error=0.05, max_rank=8)
    (site,) = plan.sites
    assert [d.term for d in site.decisions] == ["none", "low_rank", "relative_table"]
    found, exact = case.output(model, x), case.output(whole, x)
    assert not torch.equal(found, exact)
    assert float((found - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_trained_terms_of_heads() -> None:
    """Each head's own reach it, and only the parts of the table get gradients that are read."""
    case = group()
    model, x = case.model(), case.inputs()
    plain, truth = case.output(original(model), x), case.truth(model, x)
    patch_model(model, method="exact", train="terms", backend="eager", force_all=True)
    assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(case.model(), x))
    model(x).square().sum().backward()
    (table,) = (p for name, p in model.named_parameters() if "score_bias." in name)
    assert table.grad is not None and bool((table.grad.abs().sum(-1) > 0).all())
    with torch.no_grad():
        table.add_(torch.randn_like(table))
    changed = case.output(model, x)
    assert not torch.allclose(changed, plain, rtol=1e-2)
    assert freeze_terms(model) == 1
    assert torch.equal(case.output(model, x), changed)


@pytest.mark.parametrize("case", [CASCADED, group()], ids=str)
def test_a_peer_gets_the_bias_of_each_head(case: Case) -> None:
    model, x = case.model(), case.inputs()
    case.patch(model)
    plain, truth = case.output(original(model), x), case.truth(model, x)
    with attending(model, dense_sdpa()):
        for _ in range(2):
            found = case.output(model, x)
            assert_parity(found, plain, truth, nearby=case.nearby(model, x))


def test_calibration_counts_errors_by_head() -> None:
    """Heads that lose most are those of large tables, whatever the calls are."""
    case = group(resolution=7)
    model, x = case.model(), case.inputs()
    with torch.no_grad():
        model[0].attention_biases[:2] *= 1e-4
    plan = calibrate_model(model, [x], max_output_error=1e-3, backend="eager")
    (site,) = plan.sites
    taken = [d.term for d in site.decisions]
    assert taken[0] == taken[1] == "none" != taken[2]

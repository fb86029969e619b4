"""Swin, Swin V2 and their copies in transformers, patched, against the originals."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, patch_model, unpatch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.fallback import _warn as say_original
from flashbias_convert.swap import patched_modules
from tests.recipes.parity import CHECKS, ONCE, Case, check_bfloat16, check_training
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}


def last(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).last_hidden_state
    return out


def maps(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([m.flatten() for m in model(x).feature_maps])


def vision(kind: str, config: str | None = None, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        settings = getattr(transformers, f"{config or kind}Config")(**{**TINY, **changes})
        found: Any = transformers
        if kind in ("DonutSwin", "MaskFormerSwin"):
            from transformers.models.donut import modeling_donut_swin
            from transformers.models.maskformer import modeling_maskformer_swin

            found = modeling_donut_swin if kind == "DonutSwin" else modeling_maskformer_swin
        cls = found.SwinBackbone if kind == "SwinBackbone" else getattr(found, f"{kind}Model")
        made: nn.Module = cls(settings)
        return made

    return make


def case(
    name: str, kind: str, size: int | tuple[int, int] = 32, run: Any = last, **changes: Any
) -> Case:
    masked = changes.pop("masked", True)
    sites = changes.pop("sites", 3)
    shape = (size, size) if isinstance(size, int) else size
    channels = changes.get("num_channels", 3)
    return Case(name, vision(kind, **changes), (2, channels, *shape), run, sites, masked)


def clap() -> nn.Module:
    """64 mel bins and 64 frames on a map of 16 x 16."""
    config = transformers.ClapAudioConfig(
        spec_size=64, num_mel_bins=16, patch_size=4, patch_stride=[4, 4], window_size=4,
        patch_embeds_hidden_size=32, depths=[2, 1], num_attention_heads=[2, 4], hidden_size=64,
        enable_fusion=False, drop_path_rate=0.0, num_classes=4,
    )  # fmt: skip
    return transformers.ClapAudioModel(config)  # type: ignore[no-any-return]


def hear(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x, is_longer=torch.zeros(len(x), 1, dtype=torch.bool)).last_hidden_state
    return out


SWIN = case("Swin", "Swin")
SWINV2 = case("Swinv2", "Swinv2")
DONUT = case("Donut", "DonutSwin")
CASES = [
    SWIN,
    case("Swin, padded", "Swin", 36, window_size=7, image_size=36),
    case("Swin, another size", "Swin", (40, 48)),
    case("Swin, no qkv bias", "Swin", qkv_bias=False),
    case("Swin, one window", "Swin", window_size=16, depths=[2], num_heads=[2], sites=2,
         masked=False),
    case("Swin, a backbone with one window", "SwinBackbone", run=maps, config="Swin",
         window_size=16, depths=[2], num_heads=[2], sites=2),
    SWINV2,
    case("Swinv2, padded", "Swinv2", 36, window_size=7, image_size=36),
    case("Swinv2, pretrained windows", "Swinv2", pretrained_window_sizes=[6, 3]),
    case("Swinv2, window larger than the map", "Swinv2", window_size=24, masked=False),
    case("Swinv2, another size", "Swinv2", (40, 48)),
    DONUT,
    case("Donut, no qkv bias", "DonutSwin", qkv_bias=False),
    case("MaskFormer", "MaskFormerSwin"),
    Case("CLAP", clap, (2, 1, 64, 16), hear, masked=True),
    case("Swin2SR", "Swin2SR", 32, num_channels=3, patch_size=1, depths=[2, 1],
         num_heads=[2, 2], window_size=8),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    if case.name == "MaskFormer" and check is check_bfloat16:
        require_bfloat16(case)
    check(case)


def require_bfloat16(case: Case) -> None:
    """Skip where the original cannot: that of transformers 5.17 adds a mask in float32."""
    try:
        case.output(case.model().bfloat16(), case.inputs().bfloat16())
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        pytest.skip(f"the original does not run in bfloat16: {error}")


@pytest.mark.parametrize("case", [SWIN, SWINV2, DONUT], ids=str)
@pytest.mark.parametrize("check", ONCE)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def shifted(model: Any) -> Any:
    """The layer of a model whose map is rolled."""
    return model.encoder.layers[0].blocks[1]


@pytest.mark.parametrize("name", ["MaskFormer", "CLAP", "Swin2SR"])
def test_training_is_the_original(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    check_training(case)


@pytest.mark.parametrize("case", [SWIN, SWINV2], ids=str)
def test_a_shifted_layer_compiles_into_one_graph(case: Case) -> None:
    model = case.model()
    case.patch(model)
    layer, x = shifted(model), torch.randn(1, 256, 32, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = layer(x, (16, 16))[0]
        assert torch.equal(compiled(x, (16, 16))[0], expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x, (16, 16))[0], expected)


@pytest.mark.parametrize("case", [SWIN, SWINV2, DONUT], ids=str)
def test_a_mask_is_made_and_compared_once_per_size(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case.model(), case.inputs()
    plan = case.patch(model)
    assert [site.terms() for site in plan.sites][1] == ("relative_table", "regions")
    compared: list[bool] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *args: compared.append(equal(*args)) or compared[-1])
    with torch.inference_mode():  # a mask that is kept must serve outside, too
        model(x)
    for _ in range(2):
        case.output(model, x)
    assert compared == [True]
    twin = copy.deepcopy(model)
    case.output(twin, torch.randn(2, 3, 40, 48))
    assert compared == [True]  # of another shape: nothing to compare
    assert torch.equal(case.output(twin, x), case.output(model, x))


def test_the_mask_of_swin_v2_is_added_twice() -> None:
    model = SWINV2.model()
    SWINV2.patch(model)
    regions = patched_modules(model)[1].score_bias.planned_regions()
    assert regions is not None and regions.value == -200.0


@pytest.mark.parametrize("case", [SWIN, SWINV2, DONUT], ids=str)
def test_attention_weights_come_from_the_original(case: Case) -> None:
    model, x = case.model(), case.inputs()
    if case is SWIN:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(x, output_attentions=True)
        case.patch(model)
        say_original.cache_clear()
        with pytest.warns(BackendFallbackWarning, match="attention weights"):
            out = model(x, output_attentions=True)
        model.config.output_attentions = True
        by_config = model(x)
    assert len(plain.attentions) == len(out.attentions) == len(by_config.attentions) == 2
    for theirs, ours, again in zip(
        plain.attentions, out.attentions, by_config.attentions, strict=True
    ):
        assert torch.equal(theirs, ours) and torch.equal(theirs, again)
    assert torch.equal(plain.last_hidden_state, out.last_hidden_state)


def test_hidden_states_are_recorded_as_before() -> None:
    model, x = SWIN.model(), SWIN.inputs()
    with torch.no_grad():
        plain = model(x, output_hidden_states=True).hidden_states
        SWIN.patch(model)
        out = model(x, output_hidden_states=True).hidden_states
    assert len(plain) == len(out) == 3
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain, out, strict=True))


def test_a_padded_token_stays_finite_where_the_original_does_not() -> None:
    # it is zero and keys have no bias: in fp16 the original divides zero by zero
    model = vision("Swinv2", image_size=32, window_size=7, qkv_bias=False)().eval().half()
    x = SWINV2.inputs().half()
    with torch.no_grad():
        assert not last(model, x).isfinite().all()
        patch_model(model, backend="sdpa")
        assert last(model, x).isfinite().all()


@pytest.mark.parametrize("kind", ["Swin", "Swinv2", "DonutSwin"])
def test_a_map_of_one_window_ends_shifts_as_in_the_original(kind: str) -> None:
    """`set_shift_and_window_size` of Swin and Donut sets them to zero for the calls after, too."""
    one = case(kind, kind, depths=[2], num_heads=[2], sites=2)
    model = one.model()
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    one.patch(model)
    for side in (32, 8, 32):
        x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
        expected, true = one.output(plain, x), one.output(truth, x.double())
        assert_parity(one.output(model, x), expected, true)
        assert shifted(model).shift_size == shifted(plain).shift_size
        assert shifted(model).window_size == shifted(plain).window_size


@pytest.mark.parametrize("size", [(4, 4), (6, 20)])
def test_a_map_smaller_than_its_window_is_refused(size: tuple[int, int]) -> None:
    """`set_shift_and_window_size` makes the window as small, the bias stays: an error before, too.

    That of Swin V2 does not, and pads the map.
    """
    for one in (SWIN, DONUT):
        model = one.model()
        plain = copy.deepcopy(model)
        one.patch(model)
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        with pytest.raises(RuntimeError):
            one.output(plain, x)
        with pytest.raises(ValueError, match="is for 16 queries, the call has"):
            one.output(model, x)
    small = dataclasses.replace(SWINV2, size=(2, 3, *size))
    small.agrees(patched_version(small), small.inputs())


def patched_version(case: Case) -> Any:
    model = case.model()
    case.patch(model)
    return model


def test_short_windows_are_left_alone_with_their_layers() -> None:
    model = vision("Swin", window_size=3, image_size=24)().eval()
    plan = inspect_model(model)
    assert plan.counts() == {"left alone": 3}
    assert all("gains little" in site.reason for site in plan.sites)
    patch_model(model)
    assert type(shifted(model)).__name__ == "SwinLayer"


def test_unpatching_gives_the_layers_back() -> None:
    model = SWIN.model()
    SWIN.patch(model)
    assert type(shifted(model)).__name__ == "FlashBiasSwinLayer"
    assert unpatch_model(model) == 3
    assert type(shifted(model)).__name__ == "SwinLayer"
    assert type(shifted(model).attention).__name__ == "SwinAttention"


def test_one_layer_can_be_converted_alone() -> None:
    model, x = SWIN.model(), SWIN.inputs()
    plain, truth = SWIN.output(model, x), SWIN.truth(model, x)
    plan = patch_model(model, method="exact", backend="sdpa", include="re:.*blocks.1.attention")
    assert plan.counts() == {"patched": 1, "left alone": 2}
    assert_parity(SWIN.output(model, x), plain, truth)


@pytest.mark.parametrize("case", [SWIN, SWINV2], ids=str)
def test_older_layers_that_take_no_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = type(shifted(case.model()))
    today: Any = layer.get_attn_mask

    def older(self: nn.Module, height: int, width: int, dtype: torch.dtype) -> Tensor | None:
        known = inspect.signature(today).parameters
        where = {"device": "cpu"} if "device" in known else {}
        made: Tensor | None = today(self, height, width, dtype=dtype, **where)
        return made

    model = case.model()
    want = patch_model(copy.deepcopy(model), method="exact", backend="sdpa")
    monkeypatch.setattr(layer, "get_attn_mask", older)
    plan = patch_model(model, method="exact", backend="sdpa")
    assert [(s.status, s.reason) for s in plan.sites] == [(s.status, s.reason) for s in want.sites]
    assert any("regions" in site.reason for site in plan.sites)


def test_an_attention_without_its_layer_is_converted() -> None:
    attention = SWIN.model().encoder.layers[0].blocks[0].attention
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    mask = shifted(SWIN.model()).get_attn_mask(8, 8, dtype=torch.float32, device=x.device)
    with torch.no_grad():
        plain, truth = attention(x, mask)[0], copy.deepcopy(attention).double()
        truth = truth(x.double(), mask.double())[0]
        patch_model(attention, method="exact", backend="sdpa")
        assert_parity(attention(x, mask)[0], plain, truth)


@pytest.mark.parametrize("case", [SWIN, SWINV2], ids=str)
def test_garbage_in_the_index_is_refused(case: Case) -> None:
    model = case.model()
    for name, buffer in model.named_buffers():
        if name.endswith("relative_position_index"):
            buffer.fill_(4595887523461469503)
    plan = inspect_model(model, method="exact")
    assert plan.counts() == {"unsupported": 3}

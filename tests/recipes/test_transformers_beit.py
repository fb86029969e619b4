"""BEiT of transformers, patched, against the original: sizes, shared tables, backbones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, unpatch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.built_terms import cls_window_table
from flashbias_convert.fallback import _warn as say_original
from flashbias_convert.recipes.transformers_beit import resized
from tests.recipes.model_parity import in_a_folder
from tests.recipes.parity import CHECKS, ONCE, Case, check_float16, check_training, original
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "image_size": 20,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "drop_path_rate": 0.0,
    "use_relative_position_bias": True,
}
SHARED_ONLY = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}


def make(**changes: Any) -> Any:
    return transformers.BeitModel(transformers.BeitConfig(**{**TINY, **changes}))


def last(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).last_hidden_state
    return out


def case(name: str, size: tuple[int, int] = (20, 20), **changes: Any) -> Case:
    return Case(name, lambda: make(**changes), (2, 3, *size), last, sites=2)


OWN = case("own")
SHARED = case("shared", **SHARED_ONLY)
BOTH = case("both", use_shared_relative_position_bias=True)
CASES = [
    OWN,
    case("another size", (28, 12)),
    case("non-square config", (20, 28), image_size=[20, 28]),
    case("non-square config, another size", (24, 20), image_size=[20, 28]),
    case("no layer scale", layer_scale_init_value=0.0),
    SHARED,
    case("shared, another size", (28, 12), **SHARED_ONLY),
    BOTH,
    case("both, another size", (12, 28), use_shared_relative_position_bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(OWN)


@pytest.mark.parametrize(
    "check", [c for c in ONCE if c.__name__ in ("check_training", "check_state_dict")]
)
def test_changes_where_the_bias_is_shared(check: Callable[[Case], None]) -> None:
    check(BOTH)


def test_a_layer_compiles_into_one_graph() -> None:
    model = OWN.model()
    OWN.patch(model)
    layer, generator = model.layers[0], torch.Generator().manual_seed(1)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        x = torch.randn(1, 3 * 7 + 1, 32, generator=generator)
        expected = layer(x, resolution=(12, 28))
        assert torch.equal(compiled(x, resolution=(12, 28)), expected)


@pytest.mark.parametrize("size", [(5, 5), (3, 7), (8, 2), (1, 1)])
@pytest.mark.parametrize("image", [20, [20, 28]])
def test_a_resized_table_is_what_the_original_looks_up(size: tuple[int, int], image: Any) -> None:
    source = OWN.model().layers[0].relative_position_bias
    if image != 20:
        config = transformers.BeitConfig(**{**TINY, "image_size": image})
        source = type(source)(config)
        nn.init.normal_(source.relative_position_bias_table)
    term = cls_window_table(**resized(source, size))
    term.check_codes()
    n = size[0] * size[1] + 1
    assert torch.equal(term.dense(n, n), source(size)[0])


def test_the_size_of_the_config_needs_no_table_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = OWN.model(), OWN.inputs()
    OWN.patch(model)
    monkeypatch.setattr("flashbias_convert.recipes.transformers_beit.resized", None)
    OWN.output(model, x)


def test_a_table_that_changes_is_refused_at_other_sizes_too() -> None:
    model = OWN.model()
    OWN.patch(model)
    nn.init.normal_(model.layers[1].relative_position_bias.relative_position_bias_table)
    with pytest.raises(Exception, match="have changed"):
        OWN.output(model, torch.randn(1, 3, 28, 12))


def test_a_shared_bias_is_handed_on_as_its_table() -> None:
    model, x = SHARED.model(), SHARED.inputs()
    plan = SHARED.patch(model)
    assert [site.builders() for site in plan.sites] == [("cls_window_table",)] * 2
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    SHARED.output(model, x)
    assert seen[-1]["table"].shape == (84, 2)
    model.layers[1].attention.train()  # one layer runs its original: all get the matrix
    SHARED.output(model, x)
    assert seen[-1].shape == (1, 2, 26, 26)


def test_layers_with_a_shared_bias_are_converted_together() -> None:
    plan = inspect_model(BOTH.model(), method="exact", exclude="layers.0")
    assert plan.counts() == {"left alone": 2}
    plan = inspect_model(OWN.model(), method="exact", exclude="layers.0")
    assert plan.counts() == {"left alone": 1, "patched": 1}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", [OWN, BOTH], ids=str)
def test_masks_of_the_caller_are_never_dropped(case: Case, implementation: str) -> None:
    model, x = case.model(), case.inputs()
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[1, 20:] = 0
    call = lambda m, x: m(x, attention_mask=mask).last_hidden_state  # noqa: E731
    with torch.no_grad():
        plain, truth = call(model, x), call(original(model).double(), x.double())
        assert not torch.allclose(plain, last(model, x), atol=1e-3)
        case.patch(model)
        assert_parity(call(model, x), plain, truth)


@pytest.mark.parametrize("case", [OWN, BOTH], ids=str)
def test_attention_weights_come_from_the_original(case: Case) -> None:
    model, x = case.model(), case.inputs()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(x, output_attentions=True)
        case.patch(model)
        say_original.cache_clear()
        with pytest.warns(BackendFallbackWarning, match="attention weights"):
            out = model(x, output_attentions=True)
        model.config.output_attentions = True
        by_config = model(x)
    for each in (out, by_config):
        assert len(each.attentions) == 2
        assert all(torch.equal(a, b) for a, b in zip(each.attentions, plain.attentions))  # noqa: B905


def dpt() -> nn.Module:
    backbone = transformers.BeitConfig(
        **TINY, out_features=["stage1", "stage2"], reshape_hidden_states=False
    )
    config = transformers.DPTConfig(
        backbone_config=backbone, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        neck_hidden_sizes=[8, 8], reassemble_factors=[1, 0.5], fusion_hidden_size=8,
        patch_size=4, image_size=20, is_hybrid=False, readout_type="ignore",
        neck_ignore_stages=[], head_in_index=-1,
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config)  # type: ignore[no-any-return]


def dpt_case(*size: int) -> Case:
    return Case("DPT", dpt, (1, 3, *size), lambda m, x: m(x).predicted_depth, sites=2)


DPT = dpt_case(20, 20)


@pytest.mark.parametrize("size", [(20, 20), (28, 12)])
@pytest.mark.parametrize("check", (*CHECKS[:2], check_float16))
def test_dpt_estimates_the_same_depth(size: tuple[int, int], check: Callable[[Case], None]) -> None:
    check(dpt_case(*size))


def test_dpt_trains_as_before() -> None:
    check_training(DPT)


def test_a_folder_of_dpt_converts_and_loads(tmp_path: Path) -> None:
    in_a_folder(DPT, tmp_path)


def test_a_model_without_relative_positions_has_nothing_to_convert() -> None:
    model = make(use_relative_position_bias=False).eval()
    plan = inspect_model(model)
    assert {site.reason for site in plan.sites} == {"it has no relative positions"}


def test_unpatching_gives_the_model_back() -> None:
    model = BOTH.model()
    BOTH.patch(model)
    assert unpatch_model(model) == 2
    assert type(model) is transformers.BeitModel
    assert isinstance(model.shared_position_bias, nn.Module)

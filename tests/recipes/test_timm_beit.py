"""timm's BEiT, patched, against the original: bias per block, shared by all, or both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, unpatch_model
from flashbias_convert.built_terms import cls_window_table
from flashbias_convert.errors import NothingToConvertError, StaleTermsError
from tests.recipes.parity import CHECKS, ONCE, Case, original
from tests.support import assert_parity
from tests.timm_abilities import RESIZES, needs

beit = pytest.importorskip("timm.models.beit")


def make(**changes: Any) -> Any:
    """A grid of 5 x 5 patches and a class token."""
    arguments: dict[str, Any] = {
        "img_size": 20,
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "init_values": 0.1,
        "num_classes": 5,
        "use_abs_pos_emb": False,
        "use_rel_pos_bias": True,
    }
    return beit.Beit(**{**arguments, **changes})


def tokens(model: nn.Module, x: Tensor) -> Tensor:
    """Of a whole forward: all tokens of the last block, class token included."""
    seen: list[Tensor] = []
    handle = model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[union-attr]
    model(x)
    handle.remove()
    return seen[0]


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Not by `forward`: where the bias is shared, no owner runs."""
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def case(name: str, size: tuple[int, int] = (20, 20), run: Any = tokens, **changes: Any) -> Case:
    return Case(name, lambda: make(**changes), (2, 3, *size), run, sites=2)


OWN = case("own", run=features)
SHARED = case("shared", use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
BOTH = case("both", use_shared_rel_pos_bias=True)
CASES = [
    OWN,
    case("non-square", (20, 28), img_size=(20, 28)),
    case("no qkv bias", qkv_bias=False),
    SHARED,
    case("shared, non-square", (20, 12), img_size=(20, 12), use_shared_rel_pos_bias=True),
    BOTH,
    case("both, features", run=features, use_shared_rel_pos_bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(OWN)


LOGITS = case("both, logits", run=lambda m, x: m(x), use_shared_rel_pos_bias=True)


@pytest.mark.parametrize(
    "check", [c for c in ONCE if c.__name__ not in ("check_stale", "check_truncated")]
)
def test_changes_where_the_bias_is_shared(check: Callable[[Case], None]) -> None:
    check(LOGITS)


@pytest.mark.parametrize("name", ["fused", "separate qkv bias"])
def test_variants_of_the_original(name: str) -> None:
    model = OWN.model()
    for block in model.blocks:
        block.attn.fused_attn = name == "fused"
        block.attn.qkv_bias_separate = name != "fused"
    x = OWN.inputs()
    plain, truth = OWN.output(model, x), OWN.truth(model, x)
    OWN.patch(model)
    assert_parity(OWN.output(model, x), plain, truth)


def test_the_table_holds_the_class_token_exactly() -> None:
    model = OWN.model()
    (term,) = inspect_model(model, method="exact").sites[0].bias.terms  # type: ignore[union-attr]
    attn = model.blocks[0].attn
    with torch.no_grad():
        assert torch.equal(term.dense(26, 26), attn._get_rel_pos_bias()[0])
    assert term.tensors()["table"].shape == (2, 81 + 41 + 81 + 1)


@pytest.mark.parametrize("window", [(1, 1), (1, 4), (3, 2), (5, 5)])
def test_a_shared_bias_without_its_matrix(window: tuple[int, int]) -> None:
    shared = beit.RelativePositionBias(window, 3)
    nn.init.normal_(shared.relative_position_bias_table)
    term = cls_window_table(table=shared.relative_position_bias_table, window=window)
    term.check_codes()
    n = window[0] * window[1] + 1
    assert torch.equal(term.dense(n, n), shared())


def test_a_shared_bias_is_handed_on_as_its_table() -> None:
    model = SHARED.model()
    plan = SHARED.patch(model)
    assert [site.builders() for site in plan.sites] == [("cls_window_table",)] * 2
    seen: list[Any] = []
    model.blocks[0].attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[1]), with_kwargs=True
    )
    with torch.no_grad():
        model(SHARED.inputs())
        handed_on = seen[-1]["table"]
        assert torch.equal(handed_on, model.rel_pos_bias.relative_position_bias_table)
        assert handed_on.data_ptr() == model.rel_pos_bias.relative_position_bias_table.data_ptr()
        model.blocks[1].attn.attn_drop.train()  # one block runs its original: all get the matrix
        model(SHARED.inputs())
    assert seen[-1].shape == (2, 26, 26)


def test_a_shared_table_that_changes_is_never_stale() -> None:
    model = SHARED.model()
    SHARED.patch(model)
    x = SHARED.inputs()
    before = SHARED.output(model, x)
    nn.init.normal_(model.rel_pos_bias.relative_position_bias_table)
    assert not torch.allclose(SHARED.output(model, x), before)
    plain, truth = SHARED.output(original(model), x), SHARED.truth(model, x)
    assert_parity(SHARED.output(model, x), plain, truth)


def test_blocks_with_a_shared_bias_are_converted_together() -> None:
    plan = inspect_model(BOTH.model(), method="exact", exclude="blocks.0.attn")
    assert plan.counts() == {"left alone": 2}
    plan = inspect_model(OWN.model(), method="exact", exclude="blocks.0.attn")
    assert plan.counts() == {"left alone": 1, "patched": 1}


@pytest.mark.parametrize("case", [OWN, BOTH], ids=str)
def test_another_size_is_refused_until_patched_again(case: Case) -> None:
    model = case.model()
    needs(hasattr(model, "set_input_size"), RESIZES)
    case.patch(model)
    model.set_input_size(img_size=(28, 20))
    x = torch.randn(2, 3, 28, 20, generator=torch.Generator().manual_seed(1))
    with pytest.raises(StaleTermsError):
        case.output(model, x)
    unpatch_model(model)
    plain, truth = case.output(model, x), case.truth(model, x)
    case.patch(model)
    assert_parity(case.output(model, x), plain, truth)


def test_copies_of_a_model_with_a_shared_bias_are_independent() -> None:
    model = BOTH.model()
    BOTH.patch(model)
    x = BOTH.inputs()
    expected = BOTH.output(model, x)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.rel_pos_bias.relative_position_bias_table)
    assert not torch.equal(BOTH.output(twin, x), expected)
    assert torch.equal(BOTH.output(model, x), expected)
    assert unpatch_model(model) == 2 and type(model) is beit.Beit


def test_models_without_relative_positions_have_nothing_to_convert() -> None:
    plan = inspect_model(make(use_rel_pos_bias=False).eval(), method="exact")
    assert {site.reason for site in plan.sites} == {"it has no relative positions"}
    assert plan.counts() == {"left alone": 2}
    with pytest.raises(NothingToConvertError):
        inspect_model(nn.Linear(2, 2))


def test_a_table_of_zeros_needs_no_term() -> None:
    plan = inspect_model(make().eval())
    assert {site.reason for site in plan.sites} == {"no term needed in 2 heads"}

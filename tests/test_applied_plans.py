"""Plans applied to a model: filled by tensors or by a state dict, and only where they fit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import (
    Plan,
    apply_plan,
    inspect_model,
)
from flashbias_convert.errors import StaleTermsError, UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Site
from flashbias_convert.terms import LowRank, ScoreBias
from tests.patching import ATTN, attention, patch, run
from tests.toy import (
    TOY,
    BiasedAttention,
    ToyModel,
    make_input,
    make_model,
    make_recipe,
)


def test_a_plan_from_json_is_applied_empty_and_filled_by_a_state_dict() -> None:
    source = make_model()
    plan = patch(source, method="svd")
    model = make_model(seed=9)
    apply_plan(model, Plan.from_json(plan.to_json()), recipes=[TOY], backend="sdpa", empty=True)
    with pytest.raises(StaleTermsError, match="call load_state_dict first"):
        run(model)
    with pytest.raises(StaleTermsError):
        run(copy.deepcopy(model).double(), make_input().double())
    model.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(run(model), run(source))


def constant_bias(site: Site) -> Description:
    return Description(torch.zeros(2, 36, 36), 2, 36, 36, 8)


def test_a_site_without_terms_is_filled_too() -> None:
    recipe = make_recipe(describe=constant_bias)
    source = make_model()
    plan = patch(source, recipes=[recipe])
    assert plan.sites[0].reason == "no term needed in 2 heads" and plan.sites[0].terms() == ()
    model = make_model(seed=9)
    apply_plan(model, Plan.from_json(plan.to_json()), recipes=[recipe], backend="sdpa", empty=True)
    with pytest.raises(StaleTermsError):
        run(model)
    model.load_state_dict(source.state_dict())
    assert torch.equal(run(model), run(source))
    model.load_state_dict(make_model(seed=5).state_dict(), strict=False)
    with pytest.raises(StaleTermsError):
        run(model)


@pytest.mark.parametrize("other", [{"ranks": (1, 3)}, {"split": 1}, {"heads": (1, 0)}])
def test_terms_of_equal_shapes_and_other_meaning_are_not_loaded(other: dict[str, Any]) -> None:
    def make(**kwargs: Any) -> ScoreBiasModule:
        torch.manual_seed(0)
        factors = torch.randn(2, 2, 6, 3)
        values = {"ranks": (3, 1), "split": 0} | kwargs
        return ScoreBiasModule(
            ScoreBias((LowRank(phi_q=factors[0], phi_k=factors[1], **values),), 2)
        )

    state = make().state_dict()
    make().load_state_dict(state)
    holder = nn.ModuleDict({"score_bias": make(**other)})
    with pytest.raises((ValueError, RuntimeError), match=r"layout|belong to other terms"):
        holder.load_state_dict({f"score_bias.{k}": v for k, v in state.items()})
        holder["score_bias"].prepared()


def test_a_state_dict_of_other_ranks_is_refused_by_a_patched_model() -> None:
    one, two = make_model(), make_model()
    plan = patch(one, method="svd", energy=0.3, max_attention_error=1.0)
    site = plan.patched[0]
    assert site.bias is not None
    (first,) = site.bias.terms
    assert isinstance(first, LowRank)
    changed = dataclasses.replace(first, ranks=tuple(r - 1 for r in first.head_ranks()))
    terms = ScoreBias((changed,), site.bias.num_heads)
    other = dataclasses.replace(site, bias=terms, spec=terms.spec())
    apply_plan(two, dataclasses.replace(plan, sites=[other, *plan.sites[1:]]), recipes=[TOY])
    with pytest.raises(ValueError, match="belong to other terms"):
        two.load_state_dict(one.state_dict())


def test_a_plan_on_the_meta_device_allocates_nothing() -> None:
    source = make_model()
    plan = patch(source, method="svd")
    with torch.device("meta"):
        model = ToyModel().eval()
    apply_plan(model, plan, recipes=[TOY], backend="sdpa", empty=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(run(model), run(source))


def test_a_plan_in_memory_fits_a_second_model_without_sharing() -> None:
    one, two = make_model(), make_model()
    plan = patch(one, method="svd")
    apply_plan(two, plan, recipes=[TOY], backend="sdpa")
    expected = run(two)
    assert torch.equal(expected, run(one))
    for buffer in attention(one).score_bias.buffers():
        buffer.zero_()
    assert torch.equal(run(two), expected)


def test_only_the_planned_sites_are_patched() -> None:
    model = make_model()
    plan = inspect_model(model, recipes=[TOY], method="exact", exclude=[ATTN[1]])
    patch(model)
    apply_plan(model, plan, recipes=[TOY])
    assert type(attention(model, 1)) is BiasedAttention
    assert isinstance(attention(model, 2), PatchedAttention)


def break_name(plan: Plan) -> None:
    plan.sites[1].name = "blocks.7.attn"


def break_recipe(plan: Plan) -> None:
    plan.sites[1].recipe = "another"


def break_class(plan: Plan) -> None:
    plan.sites[1].name = "blocks.1.mlp"


def drop_terms(plan: Plan) -> None:
    plan.sites[1].bias = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_name, "'blocks.7.attn', which this model does not have"),
        (break_recipe, "wants recipe 'another'"),
        (break_class, "Linear has none"),
        (drop_terms, "holds no terms"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(change: Any, message: str) -> None:
    model = make_model()
    plan = inspect_model(model, recipes=[TOY], method="exact")
    change(plan)
    with pytest.raises(UsageError, match=message):
        apply_plan(model, plan, recipes=[TOY])
    assert [type(attention(model, i)) for i in range(3)] == [BiasedAttention] * 3


def test_a_name_that_is_taken_since_the_plan_was_made_is_refused() -> None:
    model = make_model()
    plan = inspect_model(model, recipes=[TOY], method="exact")
    attention(model, 2).score_bias = nn.Identity()
    with pytest.raises(UsageError, match=r"blocks\.2\.attn: .*'score_bias'"):
        apply_plan(model, plan, recipes=[TOY])
    assert type(attention(model)) is BiasedAttention
    assert isinstance(attention(model, 2).score_bias, nn.Identity)

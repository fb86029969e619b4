"""The dry run: it finds sites, decides, and leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Plan, inspect_model
from flashbias_convert.errors import NothingToConvertError, UsageError
from flashbias_convert.inspection import library_versions
from flashbias_convert.recipe import Description, Site, UnsupportedSite
from flashbias_convert.terms import Dense, LowRank, ScoreBias
from tests.patching import ATTN
from tests.toy import (
    TOY,
    BiasedAttention,
    FlashBiasedAttention,
    ToyModel,
    describe,
    make_input,
    make_model,
    make_recipe,
)


def inspect(model: nn.Module, **options: Any) -> Plan:
    return inspect_model(model, **{"recipes": [TOY], "method": "exact", **options})


def statuses(plan: Plan) -> dict[str, str]:
    return {site.name: site.status for site in plan.sites}


def set_table(model: ToyModel, block: int, value: Tensor) -> None:
    attn = model.get_submodule(ATTN[block])
    assert isinstance(attn, BiasedAttention)
    with torch.no_grad():
        attn.table.copy_(value)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about the modules of a model that an inspection could disturb."""
    keep = ("training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        name: (
            type(module),
            [key for key in vars(module)],
            [copy.copy(vars(module)[key]) for key in keep],
            {k: (id(t), t._version) for k, t in module.named_parameters(recurse=False)},
            {k: (id(t), t._version) for k, t in module.named_buffers(recurse=False)},
        )
        for name, module in model.named_modules()
    }


# -- what is found -------------------------------------------------------------------------


def test_every_site_is_planned_in_the_order_of_the_modules() -> None:
    plan = inspect(make_model())
    assert [site.name for site in plan.sites] == ATTN
    site = plan.sites[0]
    assert (site.status, site.recipe, site.reason) == ("patched", "toy", "dense in 2 heads")
    assert (site.n, site.m, site.heads, site.head_dim) == (36, 36, 2, 8)
    assert len(site.decisions) == 2 and site.warnings == ()


def test_the_planned_terms_are_the_bias() -> None:
    model = make_model()
    attn = model.get_submodule(ATTN[1])
    assert isinstance(attn, BiasedAttention)
    site = inspect(model).sites[1]
    assert site.bias is not None
    assert torch.equal(site.bias.dense(36, 36), attn.table)
    assert site.spec == site.bias.spec()


def test_options_reach_the_decomposition() -> None:
    site = inspect(make_model(), method="svd", energy=0.9, fill=False).sites[0]
    assert site.terms() == ("low_rank",)
    assert all(1 <= rank <= 3 for rank in site.ranks())
    low, high = min(site.ranks()), max(site.ranks())
    assert site.reason == f"low_rank in 2 heads (rank {f'{low} to ' if low < high else ''}{high})"
    wider = inspect(make_model(), method="svd", energy=0.9999, fill=False).sites[0]
    assert min(wider.ranks()) > max(site.ranks())
    filled = inspect(make_model(), method="svd", energy=0.9).sites[0]
    assert min(filled.ranks()) > max(site.ranks())


def test_masks_and_closed_forms_of_the_recipe_are_added_to_the_terms() -> None:
    factor = LowRank(phi_q=torch.ones(1, 36, 1), phi_k=torch.arange(36.0).reshape(1, 36, 1))

    def with_extra(site: Site) -> Description:
        own = describe(site)
        return Description(own.bias, 2, 36, 36, 8, exact_terms=(factor,), warnings=("beware",))

    model = make_model(1)
    site = inspect(model, recipes=[make_recipe(describe=with_extra)]).sites[0]
    attn = model.get_submodule(ATTN[0])
    assert isinstance(attn, BiasedAttention) and site.bias is not None
    expected = attn.table + torch.arange(36.0)
    assert torch.allclose(site.bias.dense(36, 36), expected)
    assert site.warnings == ("beware",)
    assert site.reason == "dense in 2 heads, low_rank"


def test_a_site_with_closed_forms_alone_needs_no_bias_matrix() -> None:
    factor = LowRank(phi_q=torch.ones(1, 36, 1), phi_k=torch.ones(1, 36, 1))
    recipe = make_recipe(describe=lambda s: Description(None, 2, 36, 36, 8, exact_terms=(factor,)))
    site = inspect(make_model(1), recipes=[recipe]).sites[0]
    assert site.status == "patched" and site.decisions == () and site.terms() == ("low_rank",)


def test_a_shared_module_is_one_site_and_its_other_names_are_told() -> None:
    model = make_model()
    model.blocks[2]["attn"] = model.blocks[0]["attn"]  # type: ignore[index, operator]
    plan = inspect(model)
    assert [site.name for site in plan.sites] == ATTN[:2]
    assert plan.sites[0].warnings == ("the same module is also used as 'blocks.2.attn'",)
    assert statuses(inspect(model, exclude=[ATTN[2]]))[ATTN[0]] == "left alone"


def test_the_root_can_be_the_site() -> None:
    plan = inspect(BiasedAttention().eval())
    assert statuses(plan) == {"": "patched"}


def test_a_short_site_is_left_alone_unless_forced() -> None:
    model = nn.Sequential(BiasedAttention(tokens=9)).eval()
    site = inspect(model, method="auto").sites[0]
    assert site.status == "left alone" and "9 queries" in site.reason
    assert site.spec is None and site.bias is None and len(site.decisions) == 2
    assert inspect(model, method="auto", force_all=True).sites[0].status == "patched"


def test_progress_is_told_after_each_site() -> None:
    calls: list[tuple[int, int, str]] = []
    inspect(make_model(), progress=lambda *call: calls.append(call))
    assert calls == [(1, 3, ATTN[0]), (2, 3, ATTN[1]), (3, 3, ATTN[2])]


def test_the_plan_survives_json() -> None:
    plan = inspect(make_model(), method="svd", tokens=128)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.options.tokens == 128


def test_versions_are_recorded() -> None:
    versions = inspect(make_model()).versions
    assert versions == library_versions()
    assert {"flashbias-convert", "python", "torch", "timm"} <= versions.keys()


# -- nothing is changed --------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_an_inspection_leaves_no_trace(training: bool) -> None:
    model = make_model().train(training)
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    def noisy(site: Site) -> Description:
        torch.rand(100)
        return describe(site)

    inspect(model, recipes=[make_recipe(describe=noisy)], method="auto")
    assert torch.equal(torch.rand(4), expected)
    assert snapshot(model) == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_ambient_modes_do_not_reach_the_terms() -> None:
    model = make_model(1)

    def multiplied(site: Site) -> Description:
        own = describe(site)
        assert own.bias is not None
        return Description(own.bias @ torch.eye(36), 2, 36, 36, 8)

    recipe = make_recipe(describe=multiplied)
    plain = inspect(model, recipes=[recipe]).sites[0].bias
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        inside = inspect(model, recipes=[recipe]).sites[0].bias
    assert isinstance(plain, ScoreBias) and isinstance(inside, ScoreBias)
    assert torch.equal(plain.dense(36, 36), inside.dense(36, 36))
    for _, tensor in inside.named_tensors():
        assert not tensor.is_inference() and not tensor.requires_grad


# -- include and exclude -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "patched"),
    [
        ((), (), [0, 1, 2]),
        ([ATTN[1]], (), [1]),
        (ATTN[1], (), [1]),
        ([r"re:blocks\.[02]\.attn"], (), [0, 2]),
        (["re:.*"], [ATTN[0]], [1, 2]),
        ([ATTN[0], ATTN[1]], [r"re:.*\.1\..*"], [0]),
        ((), [r"re:blocks\.(0|1)\.attn"], [2]),
    ],
)
def test_include_and_exclude(include: Any, exclude: Any, patched: list[int]) -> None:
    plan = inspect(make_model(), include=include, exclude=exclude)
    assert [site.name for site in plan.patched] == [ATTN[i] for i in patched]
    assert len(plan.sites) == 3


def test_reasons_say_who_left_a_site_alone() -> None:
    plan = inspect(make_model(), include=ATTN[:2], exclude=["re:.*0.attn"])
    reasons = [site.reason for site in plan.sites[::2]]
    assert reasons == ["excluded by 're:.*0.attn'", "not among the included sites"]
    assert [site.status for site in plan.sites] == ["left alone", "patched", "left alone"]


@pytest.mark.parametrize("entry", ["blocks.1", "attn", "re:blocks", "re:attn", "blocks.0.mlp"])
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_an_entry_that_matches_no_site_is_a_usage_error(option: str, entry: str) -> None:
    with pytest.raises(UsageError, match=rf"{option} entry '{entry}' matches no site.*\.attn"):
        inspect(make_model(), **{option: [entry]})


def test_a_name_is_never_a_prefix() -> None:
    model = make_model(11)
    patched = inspect(model, include=["blocks.1.attn"]).patched
    assert [site.name for site in patched] == ["blocks.1.attn"]


def test_a_pattern_that_is_no_regular_expression_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        inspect(make_model(), include=["re:(unclosed"])


# -- sites that cannot be converted --------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_that_is_not_finite_fails_its_site_alone(bad: float) -> None:
    model = make_model()
    table = torch.zeros(2, 36, 36)
    table[1, 4, 5] = bad
    set_table(model, 1, table)
    plan = inspect(model)
    assert list(statuses(plan).values()) == ["patched", "failed", "patched"]
    assert plan.sites[1].bias is None and plan.sites[1].n == 36
    assert ATTN[1] in plan.sites[1].reason


def failing(error: Exception) -> Any:
    def describe_or_fail(site: Site) -> Description:
        if site.name == ATTN[1]:
            raise error
        return describe(site)

    return make_recipe(describe=describe_or_fail)


def test_an_unsupported_site_says_why() -> None:
    plan = inspect(make_model(), recipes=[failing(UnsupportedSite("it is odd"))])
    assert list(statuses(plan).values()) == ["patched", "unsupported", "patched"]
    assert plan.sites[1].reason == "it is odd"


def test_a_recipe_that_crashes_fails_its_site_alone() -> None:
    plan = inspect(make_model(), recipes=[failing(AttributeError("no attribute 'table'"))])
    assert list(statuses(plan).values()) == ["patched", "failed", "patched"]
    assert plan.sites[1].reason == "AttributeError: no attribute 'table'"


class PlainSubclass(BiasedAttention):
    pass


class OwnForward(BiasedAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_subclass_matches_but_not_if_it_has_a_forward_of_its_own() -> None:
    model = nn.Sequential(PlainSubclass(), OwnForward()).eval()
    plan = inspect(model)
    assert statuses(plan) == {"0": "patched", "1": "unsupported"}
    assert "OwnForward overrides the forward" in plan.sites[1].reason


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    model = make_model(1)
    attn = model.get_submodule(ATTN[0])
    attn.forward = lambda x: x  # type: ignore[method-assign, assignment]
    site = inspect(model).sites[0]
    assert site.status == "unsupported" and "on the instance" in site.reason


def test_a_module_with_a_score_bias_of_its_own_is_refused() -> None:
    model = make_model(1)
    model.get_submodule(ATTN[0]).register_buffer("score_bias", torch.zeros(1))
    site = inspect(model).sites[0]
    assert site.status == "unsupported" and "'score_bias'" in site.reason


def test_a_library_outside_the_tested_versions_is_a_warning() -> None:
    recipe = make_recipe(tested="<2")
    site = inspect(make_model(1), recipes=[recipe]).sites[0]
    assert site.status == "patched"
    assert any("tested with torch<2, not" in warning for warning in site.warnings)
    homeless = make_recipe(library="no-such-distribution", tested="<2")
    assert inspect(make_model(1), recipes=[homeless]).sites[0].warnings == ()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_a_child_that_is_no_longer_called_are_a_warning(kind: str) -> None:
    model = make_model(2)
    child = model.get_submodule("blocks.1.attn.attn_drop")
    getattr(child, f"register_{kind}_hook")(lambda *_: None)
    called = model.get_submodule("blocks.1.attn.proj")
    called.register_forward_hook(lambda *_: None)
    plan = inspect(model)
    assert plan.sites[0].warnings == ()
    (warning,) = plan.sites[1].warnings
    assert "hooks on attn_drop do not run" in warning


# -- models that cannot be inspected -------------------------------------------------------


class BiasedAtention(nn.Module):
    """A name like one that has a recipe."""


def test_a_model_without_sites_is_an_error_that_helps() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(1, 1), "b": BiasedAtention(), "c": nn.MultiheadAttention(2, 1)}
    )
    with pytest.raises(NothingToConvertError) as caught:
        inspect(model)
    text = str(caught.value)
    assert re.search(r"`flashbias-convert recipes` lists the \d\d that are known", text)
    assert "most alike first: tests.toy.BiasedAttention, " in text
    assert "..." not in text  # an error message has a limit
    assert "nearest classes in this model: tests.test_inspection.BiasedAtention" in text
    assert "MultiheadAttention (first at 'c')" in text


def test_weights_on_the_meta_device_are_a_usage_error() -> None:
    with torch.device("meta"):
        model = ToyModel(1)
    with pytest.raises(UsageError, match=r"meta device.*load the weights first"):
        inspect(model)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_refused_with_the_next_step(wrap: Any) -> None:
    with pytest.raises(UsageError, match=r"wrapped by.*convert the model first"):
        inspect(wrap(make_model(1)))


def test_a_wrapped_part_is_refused_too() -> None:
    model = make_model(1)
    model.blocks[0]["attn"] = torch.compile(model.blocks[0]["attn"])  # type: ignore
    with pytest.raises(UsageError, match=r"'blocks\.0\.attn' is wrapped by torch\.compile"):
        inspect(model)


@pytest.mark.parametrize(
    "options",
    [
        {"energy": 0.0},
        {"energy": math.nan},
        {"method": "best"},
        {"method": "neural"},
        {"max_rank": 0},
        {"max_attention_error": 2.0},
        {"tokens": 0},
        {"tokens": 1.5},
    ],
)
def test_options_that_make_no_sense_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        inspect(make_model(1), **options)


def test_tokens_reach_the_recipe() -> None:
    seen: list[int | None] = []

    def record(site: Site) -> Description:
        seen.append(site.tokens)
        return describe(site)

    inspect(make_model(1), recipes=[make_recipe(describe=record)], tokens=77)
    assert seen == [77]


def test_a_patched_model_is_planned_anew_from_its_weights() -> None:
    from flashbias_convert import patch_model

    model = make_model()
    fresh = inspect(model, method="svd", energy=0.9)
    patch_model(model, recipes=[TOY], method="exact")
    kept = [module.score_bias for module in model.modules() if hasattr(module, "score_bias")]
    assert inspect(model, method="svd", energy=0.9).to_json() == fresh.to_json()
    assert all(isinstance(model.get_submodule(name), FlashBiasedAttention) for name in ATTN)
    assert kept == [
        module.score_bias for module in model.modules() if hasattr(module, "score_bias")
    ]
    assert model(make_input()).isfinite().all()


def test_nan_in_a_term_of_the_recipe_is_found_too() -> None:
    def with_a_broken_mask(site: Site) -> Description:
        described = describe(site)
        mask = torch.full((described.n, described.m), float("-inf")).triu(1)
        mask[0, 0] = float("nan")
        term = Dense(bias=mask.expand(described.num_heads, -1, -1))
        return dataclasses.replace(described, exact_terms=(term,))

    plan = inspect(make_model(), recipes=[make_recipe(describe=with_a_broken_mask)])
    assert {site.status for site in plan.sites} == {"failed"}
    assert all(site.not_finite and "dense holds NaN" in site.reason for site in plan.sites)
    assert plan.to_json()["sites"][0]["not_finite"] is True

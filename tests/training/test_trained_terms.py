"""Terms as parameters: what runs in training, where gradients go, and what is never lost."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    Plan,
    apply_plan,
    freeze_terms,
    inspect_model,
    patch_model,
    patched,
    unpatch_model,
)
from flashbias_convert.errors import StaleTermsError, UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.terms import Alibi, Dense, LowRank, Regions, RelativeTable, ScoreBias
from flashbias_convert.training_plan import NOTHING_TO_TRAIN
from tests.support import assert_parity
from tests.toy import TOY, describe, make_input, make_model, make_recipe

from .models import attention, run, step, terms, train_terms, trained, undropped

# -- what is trained -----------------------------------------------------------------------


def test_the_terms_are_parameters_that_start_from_the_decomposition() -> None:
    model, plain = undropped(), undropped()
    train_terms(model)
    patch_model(plain, recipes=[TOY], method="svd", energy=0.9, backend="eager")
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {*terms(model)} <= wanted and len(terms(model)) == 4
    assert not any("score_bias" in name for name, _ in plain.named_parameters())
    for key, value in terms(plain).items():
        assert torch.equal(model.state_dict()[key], value) and value.dtype == torch.float32
    assert torch.equal(run(model), run(plain))


def test_integers_stay_buffers_and_narrow_numbers_become_fp32() -> None:
    bias = ScoreBias(
        (
            RelativeTable(table=torch.randn(2, 11), u=torch.arange(6), v=torch.arange(6)),
            Dense(bias=torch.randn(2, 6, 6).half()),
            Regions(ids=torch.zeros(6, dtype=torch.int32)),
            Alibi(slopes=torch.rand(2), pos_q=torch.arange(6), pos_k=torch.arange(6)),
        ),
        2,
    )
    module = ScoreBiasModule(bias, "eager", trained=True)
    parameters = {name: p.dtype for name, p in module.named_parameters()}
    names = ("relative_table.table", "dense.bias", "alibi.slopes")
    assert parameters == dict.fromkeys(names, torch.float32)
    assert module.spec()["trained"] is True
    for cast in (module.half, module.bfloat16, module.double):
        assert {p.dtype for p in cast().parameters()} == {torch.float32}
    rebuilt = ScoreBiasModule(ScoreBias.empty_from_spec(module.spec()), "eager", trained=True)
    rebuilt.load_state_dict(module.state_dict())
    assert torch.equal(rebuilt.bias.dense(6, 6), module.bias.dense(6, 6))


def with_factors(model: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """The original in `dtype`, its tables made of factors that ask for gradients."""
    plain = undropped().to(dtype)
    weights = {k: v for k, v in model.state_dict().items() if "score_bias" not in k}
    plain.load_state_dict(weights)
    leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in terms(model).items()}
    for block in range(2):
        module = attention(plain, block)
        start = f"blocks.{block}.attn.score_bias.low_rank.phi_"
        own = attention(model, block).score_bias.bias.terms[0]
        factors = LowRank(phi_q=leaves[start + "q"], phi_k=leaves[start + "k"], ranks=own.ranks)
        del module._parameters["table"]
        module.table = factors.dense(36, 36, dtype=dtype)
    return plain, leaves


def test_gradients_are_those_of_the_original_with_a_table_of_factors() -> None:
    """Truth in float64, and plain attention in float32 beside it."""
    model: Any = undropped()
    train_terms(model)
    model.train()

    def gradients(found: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        dtype = next(found.parameters()).dtype
        loss = found(make_input().to(dtype)).square().sum()
        named = {n: p for n, p in found.named_parameters() if p.requires_grad} | leaves
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    own = gradients(model, {})
    plain = gradients(*with_factors(model, torch.float32))
    truth = gradients(*with_factors(model, torch.float64))
    assert own.keys() == plain.keys() and {*terms(model)} <= own.keys()
    for name, found in own.items():
        assert_parity(found, plain[name], truth[name])
        assert found.any(), name


def test_training_runs_what_evaluation_runs() -> None:
    model = trained()
    evaluated = run(model)
    assert torch.equal(run(model.train()), evaluated)


@pytest.mark.parametrize("fused", [False, True])
def test_no_forms_of_terms_outlive_a_step(fused: bool) -> None:
    """A fused optimizer leaves no trace: what was made from terms before must be made anew."""
    model = undropped()
    train_terms(model)
    before = run(model)
    run(model)  # prepared, had anything been kept
    step(model, fused=fused)
    fresh = undropped()
    train_terms(fresh)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(run(model), run(fresh)) and not torch.equal(run(model), before)


def test_an_average_of_weights_is_never_computed_with_older_ones() -> None:
    model = trained()
    average = copy.deepcopy(model).requires_grad_(False)
    before = run(average)
    step(model, 3)
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1.0)
    assert torch.allclose(run(average), run(model), rtol=0, atol=1e-5)
    assert not torch.allclose(run(average), before, rtol=0, atol=1e-3)


def test_frozen_terms_are_buffers_whose_forms_are_kept() -> None:
    model = trained()
    before, names = run(model), set(model.state_dict())
    module = attention(model).score_bias
    assert module.prepared() is not module.prepared()
    assert freeze_terms(model) == 2
    assert module.prepared() is module.prepared()
    assert torch.equal(run(model), before) and set(model.state_dict()) == names
    assert not any("low_rank" in name for name, _ in model.named_parameters())
    step(model)
    for key, value in terms(trained()).items():
        assert torch.equal(value, terms(model)[key])
    with pytest.raises(UsageError, match="are trained"):
        unpatch_model(model)
    thawed = undropped()
    train_terms(thawed)
    thawed.load_state_dict(model.state_dict())
    assert torch.equal(run(thawed), run(model))


def test_the_sources_of_a_bias_rest() -> None:
    model = undropped()
    train_terms(model)
    table = attention(model).table
    assert not table.requires_grad and attention(model).resting == ("table",)
    before = table.clone()
    step(model, 3)
    assert torch.equal(table, before)
    assert unpatch_model(model, discard_trained=True) == 2
    assert attention(model).table is table and table.requires_grad
    assert "resting" not in vars(attention(model))


def test_parameters_that_rested_before_do_so_after() -> None:
    model = undropped()
    attention(model).table.requires_grad_(False)
    train_terms(model)
    unpatch_model(model, discard_trained=True)
    assert not attention(model).table.requires_grad and attention(model, 1).table.requires_grad


def test_a_compiled_model_trains() -> None:
    torch._dynamo.reset()
    model: Any = undropped()
    train_terms(model)
    model.train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = []
    for call in (model, compiled):
        model.zero_grad()
        loss = call(make_input()).square().sum()
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for eager, traced in zip(*losses, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-5)


# -- what is never lost --------------------------------------------------------------------


def test_trained_terms_are_dropped_only_when_asked_to() -> None:
    model = trained()
    before = run(model)
    for forget in (
        lambda: unpatch_model(model),
        lambda: train_terms(model),
        lambda: patch_model(model, recipes=[TOY]),
        lambda: apply_plan(model, inspect_model(model, recipes=[TOY]), recipes=[TOY]),
    ):
        with pytest.raises(UsageError, match="terms of 2 modules are trained"):
            forget()
        assert torch.equal(run(model), before)
    with (
        pytest.raises(UsageError, match=r"patched\(\) forgets"),
        patched(undropped(), train="terms"),
    ):
        pass
    with pytest.raises(UsageError, match="are trained"), patched(model, recipes=[TOY]):
        pass
    assert torch.equal(run(model), before) and not attention(model).table.requires_grad
    assert unpatch_model(model, discard_trained=True) == 2


def test_exact_terms_that_are_trained_are_exact_no_more() -> None:
    model = undropped()
    plan = inspect_model(model, recipes=[TOY], method="exact")
    assert all(site.is_exact() for site in plan.sites)
    apply_plan(model, plan, recipes=[TOY], backend="eager", train="terms")
    assert not any(site.is_exact() for site in plan.sites)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_trained_on_its_own(copied: Callable[[Any], Any]) -> None:
    model = trained()
    before = run(model)
    other = copied(model)
    assert torch.equal(run(other), before)
    step(other)
    assert not torch.equal(run(other), before) and torch.equal(run(model), before)


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_a_cast_rounds_no_term(cast: str) -> None:
    model = trained()
    before = terms(model)
    getattr(model, cast)()
    assert next(model.parameters()).dtype != torch.float32
    for key, value in terms(model).items():
        assert torch.equal(value, before[key])
    model.train()
    model(make_input().to(next(model.parameters()).dtype)).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        if ".low_rank." in name:
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    model.float()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_original_weights_that_come_alone_are_noticed() -> None:
    model = trained()
    weights = {k: v for k, v in make_model(2, seed=5).state_dict().items()}
    model.load_state_dict(weights, strict=False)
    with pytest.raises(StaleTermsError):
        run(model)


def test_a_changed_size_is_noticed() -> None:
    model = trained()
    attention(model).tokens = 25
    with pytest.raises(StaleTermsError):
        run(model)


def test_the_original_forward_is_refused() -> None:
    module = attention(trained())
    with pytest.raises(UsageError, match="does not know the bias that was trained"):
        module.original_forward(make_input())


def test_a_call_that_leaves_trained_terms_out_is_refused() -> None:
    module = attention(trained()).score_bias
    q, k, v = torch.randn(3, 2, 2, 36, 8).unbind(0)
    module(q, k, v, without=("regions",))
    with pytest.raises(UsageError, match="another bias than the low_rank"):
        module(q, k, v, without=("low_rank",))


# -- dropout -------------------------------------------------------------------------------


def test_dropout_of_attention_weights_is_refused_and_the_model_as_it_was() -> None:
    model = make_model(2)
    with pytest.raises(UsageError, match=r"blocks.0.attn: .*attn_drop.p is 0.2"):
        train_terms(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not hasattr(attention(model), "score_bias")


def test_dropout_that_is_switched_on_later_is_refused() -> None:
    model = trained()
    attention(model).attn_drop.p = 0.1
    run(model)  # nothing is dropped in evaluation
    with pytest.raises(UsageError, match=r"attn_drop.p is 0.1"):
        model.train()
    model.eval()
    attention(model).attn_drop.train()
    with pytest.raises(UsageError, match=r"attn_drop.p is 0.1"):
        model(make_input())


def test_a_probability_that_is_a_number_counts() -> None:
    model = undropped()
    attention(model, 1).attention_dropout = 0.5
    with pytest.raises(UsageError, match=r"blocks.1.attn: .*attention_dropout is 0.5"):
        train_terms(model)


# -- plans ---------------------------------------------------------------------------------


def test_a_plan_says_what_it_trains() -> None:
    model = undropped()
    plan = inspect_model(model, recipes=[TOY], method="svd")
    assert not any(site.trains_terms() for site in plan.sites)
    apply_plan(model, plan, recipes=[TOY], backend="eager", train="terms")
    assert all(site.reason.endswith("; trained from there") for site in plan.sites)
    again = Plan.from_json(plan.to_json())
    assert all(site.trains_terms() for site in again.sites)
    empty = undropped()
    apply_plan(empty, again, recipes=[TOY], backend="eager", empty=True)
    with pytest.raises(StaleTermsError, match="not been loaded"):
        run(empty)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(run(empty), run(model))
    assert all(p.requires_grad for n, p in empty.named_parameters() if "low_rank" in n)


def test_sites_without_terms_to_train_run_their_original() -> None:
    def only_masked(site: Any) -> Any:
        found = describe(site)
        if not site.name.startswith("blocks.1"):
            return found
        mask = Regions(ids=torch.arange(36) // 12)
        return dataclasses.replace(found, bias=None, exact_terms=(mask,))

    recipe = make_recipe(describe=only_masked)
    model = undropped()
    plan = train_terms(model, recipes=[recipe])
    assert [NOTHING_TO_TRAIN in site.warnings for site in plan.sites] == [False, True]
    assert attention(model).trains_terms and not attention(model, 1).trains_terms
    assert attention(model, 1).table.requires_grad
    model.train()
    assert not attention(model).runs_original() and attention(model, 1).runs_original()


def test_nothing_to_train_at_all_is_an_error() -> None:
    def masked(site: Any) -> Any:
        mask = Regions(ids=torch.arange(36) // 12)
        return dataclasses.replace(describe(site), bias=None, exact_terms=(mask,))

    model = undropped()
    with pytest.raises(UsageError, match="no site has terms that could be trained"):
        train_terms(model, recipes=[make_recipe(describe=masked)])
    assert type(attention(model)) is type(attention(undropped()))


@pytest.mark.parametrize("value", ["all", True, ""])
def test_another_value_is_an_error(value: Any) -> None:
    model: nn.Module = undropped()
    with pytest.raises(UsageError, match=r'train must be "terms" or None'):
        patch_model(model, train=value, recipes=[TOY])

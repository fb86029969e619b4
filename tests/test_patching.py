"""Patching in place: reversible, repeatable, and never a computation with stale terms."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import (
    Plan,
    patched,
    patched_attention,
    unpatch_model,
)
from flashbias_convert.errors import UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.terms import Dense, LowRank, ScoreBias
from tests import patching
from tests.patching import ATTN, attention, patch, run
from tests.support import assert_parity
from tests.toy import (
    TOY,
    BiasedAttention,
    FlashBiasedAttention,
    make_input,
    make_model,
    make_recipe,
)

# -- what a patched model computes ---------------------------------------------------------


def test_a_patched_model_agrees_with_the_original() -> None:
    model = make_model()
    plain, truth = run(model), run(copy.deepcopy(model).double(), make_input().double())
    patch(model)
    assert not torch.equal(run(model), plain), "the original forward still runs"
    assert_parity(run(model), plain, truth)


def test_the_bias_reaches_the_scores() -> None:
    model = make_model()
    plain, truth = run(model), run(copy.deepcopy(model).double(), make_input().double())
    patch(model)
    for module in model.modules():
        if isinstance(module, Dense | ScoreBiasModule):
            module.get_buffer("dense.bias").zero_()
    with pytest.raises(AssertionError, match="error"):
        assert_parity(run(model), plain, truth)


def test_less_energy_is_less_exact() -> None:
    model = make_model()
    plain, errors = run(model), []
    for energy in (0.5, 0.9, 0.9999):
        patch(model, method="svd", energy=energy, max_attention_error=1.0, fill=False)
        errors.append(float((run(model) - plain).abs().max()))
    assert errors[0] > errors[1] > errors[2] > 0


@pytest.mark.parametrize("backend", ["sdpa", "eager", "auto"])
def test_the_backend_reaches_every_site(backend: str) -> None:
    model = make_model()
    patch(model, backend=backend)
    assert [attention(model, i).score_bias.backend for i in range(3)] == [backend] * 3


def test_an_unknown_backend_is_refused_before_the_first_call() -> None:
    model = make_model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UsageError, match=r"backend must be one of .* got 'flash'"):
        patch(model, backend="flash")
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_training_mode_is_the_original_with_all_its_gradients() -> None:
    model = make_model().train()
    reference = copy.deepcopy(model)
    patch(model)
    outs = []
    for each in (model, reference):
        torch.manual_seed(5)  # dropout
        outs.append(each(make_input()))
        outs[-1].square().sum().backward()
    assert torch.equal(*outs)
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, theirs[name].grad), name  # type: ignore[arg-type]


class NothingBypassed(FlashBiasedAttention):
    bypassed = ()


def test_training_mode_is_the_original_if_no_child_is_bypassed() -> None:
    model = make_model()
    patch(model, recipes=[make_recipe(attention=NothingBypassed)], method="svd", energy=0.9)
    attention(model).training = True  # without its children
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert torch.equal(run(attention(model)), run(attention(plain)))


def test_dropout_switched_on_by_hand_is_applied() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    patch(model)
    outs = []
    for each in (model, reference):
        attention(each).attn_drop.train()
        torch.manual_seed(5)
        outs.append(run(each.blocks[0]["attn"]))
    assert torch.equal(*outs)


def test_gradients_in_eval_mode_flow_but_are_warned_about_once() -> None:
    patched_attention._warn_no_gradients.cache_clear()
    model = make_model()
    reference = copy.deepcopy(model)
    patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(make_input()).sum().backward()
        model(make_input())
    assert len([w for w in caught if "get no gradient" in str(w.message)]) == 1
    reference(make_input()).sum().backward()
    assert attention(model).table.grad is None
    ours, theirs = attention(model).qkv.weight.grad, attention(reference).qkv.weight.grad
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("freeze", [True, False])
def test_no_warning_without_gradients(freeze: bool) -> None:
    patched_attention._warn_no_gradients.cache_clear()
    model = make_model()
    patch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if freeze:
            model.requires_grad_(False)
            model(make_input())
        else:
            run(model)


def test_parents_that_call_forward_directly_get_the_patched_result() -> None:
    model = make_model()
    attn = attention(model)
    plain = run(attn)
    patch(model, method="svd", energy=0.9)
    with torch.no_grad():
        assert torch.equal(attn.forward(make_input()), run(attn))
    assert not torch.equal(run(attn), plain)


# -- what stays ----------------------------------------------------------------------------


def test_names_parameters_and_identity_stay() -> None:
    model = make_model()
    keys, modules = list(model.state_dict()), list(model.modules())
    parameters = list(model.parameters())
    patch(model)
    assert attention(model).__class__.__name__ == "FlashBiasBiasedAttention"
    assert isinstance(attention(model), BiasedAttention)
    assert [m for m in model.modules() if m in set(modules)] == modules
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    new = list(model.state_dict())
    assert [k for k in new if "score_bias" not in k] == keys
    own = [f"{n}.score_bias.{key}" for n in ATTN for key in ("layout", "made_from", "dense.bias")]
    assert [k for k in new if "score_bias" in k] == own


def test_terms_have_their_own_contiguous_memory() -> None:
    model = make_model()
    plan = patch(model, method="svd")
    pointers = set()
    for site in plan.sites:
        for name, buffer in model.get_submodule(site.name).score_bias.named_buffers():
            assert buffer.is_contiguous(), name
            pointers.add(buffer.untyped_storage().data_ptr())
        assert site.bias is not None
        own = {t.untyped_storage().data_ptr() for _, t in site.bias.named_tensors()}
        assert own.isdisjoint(pointers)
    assert len(pointers) == 12  # two factors, the layout, what they were made from, three times


def test_hooks_stay_and_fire_once_per_call() -> None:
    model = make_model()
    calls: list[str] = []
    attn = attention(model)
    attn.register_forward_pre_hook(lambda *_: calls.append("before"))
    attn.register_forward_hook(lambda *_: calls.append("after"))
    attn.register_full_backward_hook(lambda *_: calls.append("backward"))
    patch(model)
    model(make_input()).sum().backward()
    assert calls == ["before", "after", "backward"]
    unpatch_model(model)
    model(make_input())
    assert calls == ["before", "after", "backward", "before", "after"]


def test_other_models_of_the_same_class_are_not_touched() -> None:
    one, two = make_model(), make_model()
    plain = run(two)
    patch(one, method="svd", energy=0.9)
    assert type(attention(two)) is BiasedAttention
    assert torch.equal(run(two), plain)
    assert not torch.equal(run(one), plain)


def test_a_shared_module_is_patched_once_and_everywhere() -> None:
    model = make_model()
    shared = model.blocks[0]["attn"]  # type: ignore[index]
    model.blocks[2]["attn"] = shared  # type: ignore[index, operator]
    count = len(list(model.parameters()))
    plain, truth = run(model), run(copy.deepcopy(model).double(), make_input().double())
    plan = patch(model)
    assert len(plan.patched) == 2 and attention(model, 0) is attention(model, 2)
    assert len(list(model.parameters())) == count
    assert_parity(run(model), plain, truth)
    assert unpatch_model(model) == 2
    assert type(attention(model, 2)) is BiasedAttention


def test_a_failed_site_stays_as_it_was() -> None:
    model = make_model()
    with torch.no_grad():
        attention(model, 1).table[0, 0, 0] = float("nan")
    plan = patch(model)
    assert plan.counts() == {"patched": 2, "failed": 1}
    assert type(attention(model, 1)) is BiasedAttention
    assert "score_bias" not in attention(model, 1)._modules


def test_a_site_whose_svd_never_converges_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with torch.no_grad():  # no singular value is larger than another
        attention(model, 1).table.copy_(torch.eye(36).expand(2, 36, 36))

    def unless_alike(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(matrix: Tensor, **options: Any) -> Any:
            if torch.linalg.matrix_norm(matrix, 2).max() < 1.5:
                raise torch.linalg.LinAlgError("did not converge")
            return function(matrix, **options)

        return call

    for name in ("svd", "svdvals", "eigh"):
        monkeypatch.setattr(torch.linalg, name, unless_alike(getattr(torch.linalg, name)))
    plan = patch(model, method="svd")
    assert [site.status for site in plan.sites] == ["patched", "failed", "patched"]
    assert "did not converge" in plan.sites[1].reason and ATTN[1] in plan.sites[1].reason
    assert type(attention(model, 1)) is BiasedAttention
    assert isinstance(attention(model, 2), PatchedAttention)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_gets_the_factors_of_its_weights(dtype: torch.dtype) -> None:
    """There is no SVD in half precision, and factors are no place for its rounding."""
    model = make_model().to(dtype)
    wide = copy.deepcopy(model).double()
    patch(model, method="svd", energy=0.9)
    patch(wide, method="svd", energy=0.9)
    for site in range(3):
        found, expected = (
            dict(attention(m, site).score_bias.named_buffers()) for m in (model, wide)
        )
        assert found.keys() == expected.keys() >= {"low_rank.phi_q", "low_rank.phi_k"}
        assert found["low_rank.phi_q"].dtype == torch.float32
        assert all(torch.equal(found[key], expected[key]) for key in found)
    assert run(model, make_input().to(dtype)).isfinite().all()


# -- and back ------------------------------------------------------------------------------


def test_unpatching_restores_everything_bit_for_bit() -> None:
    model = make_model()
    plain, state = run(model), copy.deepcopy(model.state_dict())
    attributes = {name: list(vars(attention(model, i))) for i, name in enumerate(ATTN)}
    hooks = dict(attention(model)._load_state_dict_post_hooks)
    parameters = list(model.parameters())
    patch(model, method="svd")
    assert unpatch_model(model) == 3
    assert [type(attention(model, i)) for i in range(3)] == [BiasedAttention] * 3
    assert {n: list(vars(attention(model, i))) for i, n in enumerate(ATTN)} == attributes
    assert attention(model)._load_state_dict_post_hooks == hooks
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(run(model), plain)
    assert unpatch_model(model) == 0


def test_patching_twice_is_patching_once() -> None:
    model = make_model()
    first = patch(model, method="svd")
    once, keys = run(model), list(model.state_dict())
    second = patch(model, method="svd")
    assert second.to_json() == first.to_json()
    assert torch.equal(run(model), once) and list(model.state_dict()) == keys
    assert attention(model).__class__.__mro__.count(PatchedAttention) == 1


def test_the_last_call_wins() -> None:
    model = make_model()
    patch(model, include=[ATTN[0]])
    patch(model, include=[ATTN[1]])
    classes = [isinstance(attention(model, i), PatchedAttention) for i in range(3)]
    assert classes == [False, True, False]


def live_terms() -> int:
    gc.collect()
    return sum(isinstance(o, ScoreBiasModule) for o in gc.get_objects())


def test_a_loop_of_patches_does_not_grow() -> None:
    model = make_model()
    plain, before, outs = run(model), live_terms(), {}
    for turn in range(4):
        for energy in (0.6, 0.99):
            patch(model, method="svd", energy=energy, max_attention_error=1.0)
            assert torch.equal(outs.setdefault(energy, run(model)), run(model))
            assert live_terms() == before + 3
            if turn % 2:
                unpatch_model(model)
                assert torch.equal(run(model), plain)
    unpatch_model(model)
    assert live_terms() == before
    assert not torch.equal(outs[0.6], outs[0.99])


class _Breaks(FlashBiasedAttention):
    """Fails when the second site is sealed."""

    seals = 0

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        _Breaks.seals += 1
        if _Breaks.seals == 2:
            raise RuntimeError("broken in the middle")
        return super().bias_sources()


@pytest.mark.parametrize("before", [False, True])
def test_an_exception_in_the_middle_restores_the_model(before: bool) -> None:
    model = make_model()
    if before:
        patch(model, method="svd", energy=0.9)
    expected, keys = run(model), list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    _Breaks.seals = 0
    with pytest.raises(RuntimeError, match="broken in the middle"):
        patch(model, recipes=[make_recipe(attention=_Breaks)])
    assert _Breaks.seals >= 2
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert torch.equal(run(model), expected)


def test_bad_options_leave_a_patched_model_patched() -> None:
    model = make_model()
    patch(model, method="svd", energy=0.9)
    expected = run(model)
    with pytest.raises(UsageError):
        patch(model, include=["no such site"])
    assert torch.equal(run(model), expected)


# -- as a context --------------------------------------------------------------------------


def test_the_context_restores_on_exit() -> None:
    model = make_model()
    plain = run(model)
    with patched(model, recipes=[TOY], method="svd", energy=0.9, backend="sdpa") as plan:
        assert len(plan.patched) == 3
        assert not torch.equal(run(model), plain)
    assert type(attention(model)) is BiasedAttention
    assert torch.equal(run(model), plain)


def test_the_context_restores_after_an_exception() -> None:
    model = make_model()
    with pytest.raises(KeyError), patched(model, recipes=[TOY], method="exact"):
        assert isinstance(attention(model), PatchedAttention)
        raise KeyError
    assert type(attention(model)) is BiasedAttention


def test_the_context_brings_earlier_terms_back() -> None:
    model = make_model()
    patch(model, method="svd", energy=0.9, include=ATTN[:2])
    expected = run(model)
    with patched(model, recipes=[TOY], method="exact", backend="sdpa"):
        assert not torch.equal(run(model), expected)
    assert torch.equal(run(model), expected)
    assert type(attention(model, 2)) is BiasedAttention


# -- compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_a_patched_model_compiles_once_into_one_graph(warm: bool) -> None:
    model = make_model()
    patch(model, method="svd")
    expected = run(copy.deepcopy(model))
    if warm:
        run(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(run(compiled), expected)
        assert torch.equal(run(model), expected)
        assert torch.equal(run(compiled), expected)


# -- the module of terms -------------------------------------------------------------------


def test_extra_terms_and_left_out_terms() -> None:
    first, second = torch.randn(2, 2, 6, 6).unbind(0)
    factors = LowRank(phi_q=torch.randn(2, 6, 2), phi_k=torch.randn(2, 6, 2))
    terms = ScoreBiasModule(ScoreBias((Dense(bias=first), factors), 2), "eager")
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind(0)
    thin = factors.dense(6, 6)
    for call, bias in [
        ({}, first + thin),
        ({"extra": (Dense(bias=second),)}, first + thin + second),
        ({"without": ("dense",)}, thin),
        ({"without": ("dense",), "extra": (Dense(bias=second),)}, thin + second),
        ({"without": ("dense", "low_rank")}, torch.zeros(2, 6, 6)),
    ]:
        scores = q @ k.transpose(-2, -1) / 2 + bias
        assert torch.allclose(terms(q, k, v, **call), scores.softmax(-1) @ v, atol=1e-6), call


def test_prepared_terms_are_made_once_and_again_after_a_load() -> None:
    terms = ScoreBiasModule(ScoreBias((Dense(bias=torch.zeros(2, 6, 6)),), 2))
    first = terms.prepared()
    assert terms.prepared() is first
    terms.load_state_dict({**terms.state_dict(), "dense.bias": torch.ones(2, 6, 6)})
    assert terms.prepared() is not first
    assert torch.equal(terms.bias.dense(6, 6), torch.ones(2, 6, 6))


def test_a_model_that_is_left_as_it_was_is_told_so_and_why() -> None:
    model = make_model()
    with pytest.warns(UserWarning, match=r"nothing was converted: left alone 3 \(excluded") as told:
        plan = patch(model, exclude=ATTN)
    assert not plan.patched and told[0].filename == patching.__file__
    with pytest.raises(UsageError, match=r"no terms to train: left alone 3 \(excluded"):
        patch(model, exclude=ATTN, train="terms")


def test_a_plan_without_sites_says_that() -> None:
    assert Plan(DecomposeOptions(), []).why_nothing() == "it has no sites"

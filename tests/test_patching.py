"""Patching in place: reversible, repeatable, and never a computation with stale terms."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    Plan,
    apply_plan,
    inspect_model,
    patch_model,
    patched,
    patched_attention,
    unpatch_model,
)
from flashbias_convert.errors import StaleTermsError, UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Site
from flashbias_convert.terms import Alibi, Dense, LowRank, ScoreBias
from tests.support import assert_parity
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

ATTN = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


def patch(model: nn.Module, **options: Any) -> Plan:
    return patch_model(model, **{"recipes": [TOY], "method": "exact", "backend": "sdpa", **options})


@torch.no_grad()
def run(model: nn.Module, x: Tensor | None = None) -> Tensor:
    out: Tensor = model(make_input() if x is None else x)
    return out


def attention(model: nn.Module, block: int = 0) -> Any:
    return model.get_submodule(ATTN[block])


def change_table(model: nn.Module, block: int = 0) -> None:
    with torch.no_grad():
        attention(model, block).table.mul_(-1)


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
    own = [f"{n}.score_bias.{key}" for n in ATTN for key in ("layout", "dense.bias")]
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
    assert len(pointers) == 9  # two factors and the layout, three times


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


# -- copies --------------------------------------------------------------------------------


def by_torch(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch]
)
def test_a_copy_is_patched_and_independent(duplicate: Any) -> None:
    model = make_model()
    patch(model, method="svd", energy=0.9)
    expected = run(model)  # so that there are caches to copy
    twin = duplicate(model)
    assert type(attention(twin)) is type(attention(model))
    assert torch.equal(run(twin), expected)
    unpatch_model(twin)
    assert type(attention(twin)) is BiasedAttention
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_torch])
def test_a_copy_of_a_stale_model_is_stale(duplicate: Any) -> None:
    model = make_model()
    patch(model)
    change_table(model)
    with pytest.raises(StaleTermsError):
        run(duplicate(model))


# -- stale terms ---------------------------------------------------------------------------


def replace_parameter(model: ToyModel) -> None:
    attn = attention(model)
    attn.table = nn.Parameter(attn.table.detach() * 2)


def load_other_weights(model: ToyModel) -> None:
    model.load_state_dict(make_model(seed=9).state_dict(), strict=False)


def assign_other_weights(model: ToyModel) -> None:
    model.load_state_dict(make_model(seed=9).state_dict(), strict=False, assign=True)


def replace_data(model: ToyModel) -> None:
    attention(model).table.data = attention(model).table.data * 2


def resize(model: ToyModel) -> None:
    attention(model).tokens = 49


def train_a_step(model: ToyModel) -> None:
    model.train()(make_input()).square().sum().backward()
    parameters = list(model.parameters())
    with torch.no_grad():  # what an optimizer does
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)
    model.eval()


@pytest.mark.parametrize(
    "change",
    [
        change_table,
        replace_parameter,
        load_other_weights,
        assign_other_weights,
        replace_data,
        resize,
        train_a_step,
    ],
)
def test_changed_sources_are_refused_and_a_new_patch_is_fresh(change: Any) -> None:
    model = make_model()
    patch(model)
    run(model)
    change(model)
    with pytest.raises(StaleTermsError, match="BiasedAttention have changed"):
        run(model)
    attention(model).tokens = 36
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    patch(model)
    assert_parity(run(model), run(plain), run(plain.double(), make_input().double()))


def train_two_steps(model: ToyModel, fused: bool) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    with torch.enable_grad():
        for _ in range(2):
            optimizer.zero_grad()
            model(make_input()).square().sum().backward()
            optimizer.step()
    model.eval()


def change_behind_the_back(model: ToyModel) -> None:
    model.train()
    attention(model).table.data.mul_(-1)
    model.eval()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: train_two_steps(model, fused=True),
        lambda model: train_two_steps(model, fused=False),
        change_behind_the_back,
    ],
    ids=["fused optimizer", "optimizer", "data"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_makes_terms_stale(change: Callable[[ToyModel], None], compiled: bool) -> None:
    """Fused optimizers and `.data` change numbers without a trace; so the numbers are compared."""
    torch._dynamo.reset()
    model = make_model()
    patch(model)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with torch.no_grad():
        call(make_input())
        change(model)
        with pytest.raises(StaleTermsError):
            call(make_input())


def test_training_something_else_keeps_terms() -> None:
    model = make_model()
    patch(model)
    model.train()
    with torch.no_grad():
        attention(model).qkv.weight.mul_(1.5)
    model.eval()
    run(model)


def test_other_weights_may_change() -> None:
    model = make_model()
    patch(model)
    with torch.no_grad():
        attention(model).qkv.weight.mul_(1.5)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(run(model), run(plain), run(plain.double(), make_input().double()))


def test_loading_weights_together_with_their_terms_is_fresh() -> None:
    source = make_model(seed=9)
    patch(source)
    model = make_model()
    patch(model)
    model.load_state_dict(source.state_dict())
    assert torch.equal(run(model), run(source))
    change_table(model)
    with pytest.raises(StaleTermsError):
        run(model)


def copied(model: ToyModel) -> ToyModel:
    return copy.deepcopy(model)


def loaded(model: ToyModel) -> ToyModel:
    model.load_state_dict(model.state_dict())
    return model


@pytest.mark.parametrize("renew", [copied, loaded])
def test_training_right_after_a_copy_or_a_load_makes_terms_stale(renew: Any) -> None:
    model = make_model()
    patch(model)
    model = renew(model)
    train_a_step(model)  # nobody asked about the terms in between
    with pytest.raises(StaleTermsError):
        run(model)


def test_terms_loaded_alone_do_not_vouch_for_weights_loaded_later() -> None:
    model = make_model()
    patch(model)
    attention(model).score_bias.load_state_dict(attention(model).score_bias.state_dict())
    load_other_weights(model)
    with pytest.raises(StaleTermsError):
        run(model)


def test_inference_tensors_can_be_patched() -> None:
    with torch.inference_mode():
        model = make_model()
        patch(model)
        run(model)
        assert isinstance(attention(model), PatchedAttention)


# -- moves and casts -----------------------------------------------------------------------


def mixed_description(site: Site) -> Description:
    """The bias as factors, a table of positions, and a dense part."""
    own = describe(site)
    assert own.bias is not None
    terms = (
        LowRank(phi_q=torch.randn(2, 36, 2), phi_k=torch.randn(2, 36, 2)),
        Alibi(slopes=torch.tensor([0.3, 0.7]), pos_k=torch.arange(300, 336)),
    )
    return Description(own.bias, 2, 36, 36, 8, exact_terms=terms)


MIXED = make_recipe(describe=mixed_description)


@pytest.mark.parametrize(
    ("cast", "dense"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
        (lambda m: m.half().float(), torch.float32),
    ],
)
def test_a_cast_rounds_no_factor_and_no_position(cast: Any, dense: torch.dtype) -> None:
    model = make_model()
    patch(model, recipes=[MIXED])
    buffers = {k: v.clone() for k, v in attention(model).score_bias.named_buffers()}
    cast(model)
    after = dict(attention(model).score_bias.named_buffers())
    assert after.keys() == buffers.keys()
    assert after.pop("dense.bias").dtype == dense
    for name, tensor in after.items():
        assert tensor.dtype == buffers[name].dtype and torch.equal(tensor, buffers[name]), name
    bias = attention(model).score_bias.bias
    assert {t.dtype for _, t in bias.named_tensors()} >= {torch.float32, torch.int64, dense}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_model_still_agrees_with_the_original(dtype: torch.dtype) -> None:
    model = make_model()
    patch(model, method="svd", energy=1.0)
    model.to(dtype)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    truth = run(copy.deepcopy(plain).double(), make_input().to(dtype).double())
    x = make_input().to(dtype)
    assert_parity(run(model, x), run(plain, x), truth)


def test_a_move_to_another_device_takes_the_terms_along() -> None:
    model = make_model()
    patch(model, recipes=[MIXED])
    model.to("meta")
    for name, tensor in attention(model).score_bias.named_buffers():
        assert tensor.is_meta, name
    assert attention(model).score_bias.bias.device.type == "meta"


def test_train_and_eval_reach_the_terms() -> None:
    model = make_model()
    patch(model)
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())


# -- plans ---------------------------------------------------------------------------------


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

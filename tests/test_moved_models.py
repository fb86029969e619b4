"""Copies, moves and casts of a patched model: terms go along, and none is rounded."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from flashbias_convert import unpatch_model
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.recipe import Description, Site
from flashbias_convert.terms import Alibi, LowRank, RelativeTable
from tests.patching import attention, by_torch, change_table, patch, run
from tests.support import assert_parity
from tests.toy import BiasedAttention, describe, make_input, make_model, make_recipe

# -- copies --------------------------------------------------------------------------------


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


def coded_description(site: Site) -> Description:
    """The bias beside a table whose codes are looked at when they arrive."""
    own, at = describe(site), torch.arange(36)
    table = RelativeTable(table=torch.randn(2, 71), u=at, v=35 - at)
    return Description(own.bias, 2, 36, 36, 8, exact_terms=(table,))


CODED = make_recipe(describe=coded_description)


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


def test_a_cast_model_still_agrees_with_the_original() -> None:
    model = make_model()
    patch(model, method="svd", energy=1.0)
    model.bfloat16()
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    x = make_input().bfloat16()
    truth = run(copy.deepcopy(plain).double(), x.double())
    assert_parity(run(model, x), run(plain, x), truth)


def test_a_model_in_float64_agrees_with_the_original() -> None:
    """There the original is the truth; how far rounding may lead says its error in float32."""
    model, x = make_model(), make_input()
    plain, truth = run(model, x), run(copy.deepcopy(model).double(), x.double())
    patch(model, method="svd", energy=1.0)
    error = (run(model.double(), x.double()) - truth).abs().max()
    rounding = (plain.double() - truth).abs().max()
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert rounding > 0 and error <= 2 * rounding * finer


def test_a_move_to_another_device_takes_the_terms_along() -> None:
    model = make_model()
    patch(model, recipes=[MIXED])
    model.to("meta")
    for name, tensor in attention(model).score_bias.named_buffers():
        assert tensor.is_meta, name
    assert attention(model).score_bias.bias.device.type == "meta"


def test_memory_that_nothing_was_written_to_awaits_a_state_dict() -> None:
    """From the meta device there is nothing to bring along: a state dict has to follow."""
    model = make_model()
    patch(model, recipes=[CODED])
    expected, state = run(model), copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu")
    with pytest.raises(StaleTermsError, match="have not been loaded yet"):
        run(model)
    with pytest.raises(StaleTermsError, match="have not been loaded yet"):
        run(copy.deepcopy(model).double(), make_input().double())
    model.load_state_dict(state)
    assert torch.equal(run(model), expected)


def test_overwritten_layouts_await_a_state_dict() -> None:
    model = make_model()
    patch(model, recipes=[CODED])
    expected, state = run(model), copy.deepcopy(model.state_dict())
    model._apply(lambda t: torch.full_like(t, 77))  # `to_empty`, where memory is full of something
    with pytest.raises(StaleTermsError, match="have not been loaded yet"):
        run(model)
    model.load_state_dict(state)
    assert torch.equal(run(model), expected)


def test_train_and_eval_reach_the_terms() -> None:
    model = make_model()
    patch(model)
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())


# -- tensors that are put past the module's own ways ----------------------------------------------


def by_accelerate(site: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    modeling.set_module_tensor_to_device(site, name, "cpu", value=value)


def by_dictionary(site: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    *path, last = name.split(".")
    site.get_submodule(".".join(path))._buffers[last] = value


def other_factors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {k: -2 * v for k, v in model.named_buffers() if k.endswith("phi_q")}
    assert found
    return found


@pytest.mark.parametrize("put", [by_accelerate, by_dictionary])
def test_terms_that_were_put_in_one_by_one_are_used(put: Any) -> None:
    """As accelerate moves buffers to a card; forms of those before would stay behind."""
    model = make_model()
    patch(model, method="svd", energy=0.9)
    kept, own = run(model), dict(model.named_buffers())
    for name, value in other_factors(model).items():
        put(model, name, value)
    changed = run(model)
    assert not torch.allclose(changed, kept, atol=1e-3)
    assert torch.equal(run(copy.deepcopy(model)), changed)
    for name, value in own.items():
        put(model, name, value)
    assert torch.equal(run(model), kept)


def test_a_functional_call_uses_the_terms_that_it_is_given() -> None:
    model, x = make_model(), make_input()
    patch(model, method="svd", energy=0.9)
    kept, given = run(model), other_factors(model)
    with torch.no_grad():
        found = torch.func.functional_call(model, given, (x,))
    assert torch.equal(run(model), kept)
    for name, value in given.items():
        by_dictionary(model, name, value)
    assert torch.equal(run(model), found)
    assert not torch.allclose(found, kept, atol=1e-3)


def test_a_replica_uses_its_own_tensors() -> None:
    """`nn.DataParallel` makes such copies for each call, and then moves what they hold."""
    model = make_model()
    patch(model, method="svd", energy=0.9)
    site, kept, x = attention(model), run(model), make_input()
    replicas = {m: m._replicate_for_data_parallel() for m in site.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
    replica = replicas[site].score_bias
    before = replica.bias.dense(36, 36)
    (name,) = (n for n, _ in site.score_bias.named_buffers() if n.endswith("phi_q"))
    by_dictionary(replica, name, -2 * replica.get_buffer(name))
    assert torch.allclose(replica.bias.dense(36, 36), -2 * before, atol=1e-5)
    assert torch.equal(site.score_bias.bias.dense(36, 36), before)
    with torch.no_grad():
        assert torch.equal(model(x), kept)

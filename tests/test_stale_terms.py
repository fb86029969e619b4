"""Terms that no longer belong to the weights are refused, and others are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    patched_attention,
    unpatch_model,
)
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.patched_attention import PatchedAttention
from tests.patching import attention, change_table, patch, run
from tests.support import assert_parity
from tests.toy import (
    ToyModel,
    make_input,
    make_model,
)


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
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-1e-3)
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


def write_and_look(model: ToyModel) -> None:
    change_table(model)
    model.eval()


@pytest.mark.parametrize("change", [load_other_weights, write_and_look, train_a_step])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_whole_graph_is_refused_in_the_words_of_the_error(change: Any, ran_before: bool) -> None:
    """fullgraph=True raises an error of torch.compile in any case: ours has to be told in it."""
    torch.compiler.reset()
    model = make_model()
    patch(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    if ran_before:
        run(compiled)
    change(model)
    words = "(?s)StaleTermsError.*BiasedAttention have changed since.*run unpatch_model and patch"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        run(compiled)
    with pytest.raises(StaleTermsError, match=r"BiasedAttention have changed since.*\(run unpatch"):
        run(torch.compile(model, backend="eager"))


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


def by_torch_func(model: ToyModel, factor: float) -> dict[str, Tensor]:
    """Gradients by `torch.func.grad`, for parameters times a factor."""
    given = {name: factor * p.detach() for name, p in model.named_parameters()}
    found: dict[str, Tensor] = torch.func.grad(
        lambda own: torch.func.functional_call(model, own, (make_input(),)).square().mean()
    )(given)
    return found


def test_transforms_of_torch_func_see_what_autograd_does() -> None:
    """Parameters have no memory of their own there; their numbers are compared all the same."""
    model, plain = make_model(), make_model()
    patch(model)
    before = run(model)
    patched_attention._warn_no_gradients.cache_clear()
    with pytest.warns(UserWarning, match="get no gradient"):
        found = by_torch_func(model, 1.0)
    for name, expected in by_torch_func(plain, 1.0).items():
        if name.endswith("table"):  # as the warning says
            assert not found[name].any()
        else:
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(StaleTermsError):
        by_torch_func(model, 0.9)
    assert torch.equal(run(model), before)  # it left nothing behind

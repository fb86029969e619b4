"""Weights that are written behind torch's back: on a CPU each call sees it, on a card a look."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import StaleTermsError, UsageError, check_model, save_model, seals
from tests.adapters import Adapter
from tests.patching import ATTN, attention, patch, run
from tests.toy import ToyModel, make_input, make_model


@pytest.fixture
def like_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read at a call."""
    monkeypatch.setattr(seals, "_COMPARED_BYTES", 0)


def patched_model() -> ToyModel:
    model = make_model()
    patch(model)
    run(model)
    return model


def add(model: ToyModel) -> None:
    attention(model, 1).table.data += 1e-3


def average(model: ToyModel) -> None:
    for own, other in zip(model.parameters(), make_model(seed=9).parameters(), strict=False):
        own.data.copy_(own.data.lerp(other.data, 0.1))


def one_number(model: ToyModel) -> None:
    attention(model, 1).table.data[1, 35, 35] *= -1


WRITES = [add, average, one_number]


@pytest.mark.parametrize("write", WRITES)
def test_a_call_on_a_cpu_sees_what_is_written(write: Callable[[ToyModel], None]) -> None:
    model = patched_model()
    write(model)
    with pytest.raises(StaleTermsError, match="have changed"):
        run(model)
    with pytest.raises(StaleTermsError, match=r"blocks\.1\.attn"):
        check_model(model)


def test_the_same_numbers_may_be_written() -> None:
    model = patched_model()
    expected = run(model)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.clone())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    assert torch.equal(run(model), expected) and check_model(model) == 3


def test_half_precision_and_other_strides_are_seen_or_can_be() -> None:
    model = patched_model().bfloat16()
    add_to = attention(model, 1).table
    add_to.data[0, 0, 0] += 1
    with pytest.raises(StaleTermsError):
        run(model, make_input().bfloat16())
    model = make_model()
    attention(model, 1).table.data = attention(model, 1).table.data.transpose(1, 2)
    patch(model)
    assert not attention(model, 1)._seal.copies and attention(model, 0)._seal.copies
    add(model)
    with pytest.raises(StaleTermsError, match=r"1 sites .*'blocks\.1\.attn'"):
        check_model(model)


# -- where a call does not look ------------------------------------------------------------


@pytest.mark.usefixtures("like_a_card")
@pytest.mark.parametrize("write", WRITES)
def test_check_model_names_the_sites(write: Callable[[ToyModel], None]) -> None:
    model = patched_model()
    assert check_model(model) == 3
    write(model)
    wanted = ATTN if write is average else ATTN[1:2]
    with pytest.raises(StaleTermsError) as caught:
        check_model(nn.Sequential(model))
    assert all((f"'0.{name}'" in str(caught.value)) == (name in wanted) for name in ATTN)
    with pytest.raises(StaleTermsError):  # from then on
        run(model)


LOOKS: dict[str, Callable[[ToyModel], Any]] = {
    "eval": lambda model: model.eval(),
    "to": lambda model: model.to("cpu"),
    "a cast": lambda model: model.double().float(),
    "a copy": copy.deepcopy,
}


@pytest.mark.usefixtures("like_a_card")
@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_by_itself(name: str) -> None:
    model = patched_model()
    expected = run(model)
    assert torch.equal(run(LOOKS[name](model)), expected)
    add(model)
    with pytest.raises(StaleTermsError):
        run(LOOKS[name](model))


@pytest.mark.usefixtures("like_a_card")
def test_saving_looks_by_itself(tmp_path: Any) -> None:
    model = patched_model()
    key = "score_bias.layout"
    assert all(model.state_dict()[f"{name}.{key}"].any() for name in ATTN)
    add(model)
    state = model.state_dict()
    assert [bool(state[f"{name}.{key}"].any()) for name in ATTN] == [True, False, True]
    model = patched_model()
    add(model)
    with pytest.raises(StaleTermsError):
        save_model(model, tmp_path / "x.safetensors", arch=make_model)


@pytest.mark.usefixtures("like_a_card")
def test_compiled_code_refuses_what_check_model_found() -> None:
    torch._dynamo.reset()
    model = patched_model()
    call = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        call(make_input())
        add(model)
        with pytest.raises(StaleTermsError):
            check_model(model)
        with pytest.raises(StaleTermsError):
            call(make_input())


@pytest.mark.usefixtures("like_a_card")
def test_a_parameter_that_was_away_is_looked_at_when_it_comes_back() -> None:
    model = patched_model()
    expected = run(model)
    for change in (0.0, 1.0):  # taken away as it was, then merged
        table = attention(model).table
        attention(model).table = nn.Parameter(table.detach() + 1)
        with pytest.raises(StaleTermsError):
            run(model)
        table.data += change
        attention(model).table = table
        if not change:
            assert torch.equal(run(model), expected)
    with pytest.raises(StaleTermsError):
        run(model)


def test_adapters_elsewhere_change_nothing() -> None:
    model = patched_model()
    proj = attention(model).proj
    attention(model).proj = Adapter(proj, 16, 16).eval()
    run(model)
    assert check_model(model) == 3


def test_a_model_that_is_not_patched_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match="no module of this model is patched"):
        check_model(make_model())

"""State dicts with some of a site's terms: it waits for the others, and serves none before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashbias_convert import StaleTermsError
from flashbias_convert.patching import apply_plan
from tests.patching import patch, patched_model, run
from tests.toy import TOY, make_model
from tests.training.models import undropped

State = dict[str, Tensor]
WAITS = "have not been loaded yet"


def terms_of(state: State) -> list[str]:
    """Names of tensors of terms, without their layout and what they were made from."""
    found = [key for key in state if ".score_bias." in key]
    return [key for key in found if not key.endswith(("layout", "made_from"))]


def without(state: State, lost: Callable[[str], bool]) -> State:
    return {key: tensor for key, tensor in state.items() if not lost(key)}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("lost", ["a tensor", "layout", "all tensors"])
def test_terms_that_came_in_part_are_not_served(lost: str, empty: bool) -> None:
    """What they were made from came, and fits the weights, but vouches for none that lack."""
    donor = patched_model(1)
    state = donor.state_dict()
    names = terms_of(state)
    gone = {"a tensor": names[:1], "layout": [k for k in state if k.endswith("layout")],
            "all tensors": names}[lost]  # fmt: skip
    if empty:
        model, plan = make_model(seed=0), patch(make_model(seed=1))
        apply_plan(model, plan, recipes=[TOY], empty=True)
    else:
        model = patched_model(0)
    model.load_state_dict(without(state, lambda key: key in gone), strict=False)
    with pytest.raises(StaleTermsError, match=WAITS):
        run(model)
    model.load_state_dict({key: state[key] for key in gone}, strict=False)
    assert torch.equal(run(model), run(donor))


def test_a_load_that_failed_is_not_served() -> None:
    """Of terms of other ranks nothing is copied; what they were made from vouches for nobody."""
    model, donor = patched_model(0, method="svd", energy=0.999), patched_model(1, method="exact")
    with pytest.raises(RuntimeError, match=r"Missing key|size mismatch"):
        model.load_state_dict(donor.state_dict())
    with pytest.raises(StaleTermsError, match=WAITS):
        run(model)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_site_may_be_split_over_shards(order: tuple[int, ...]) -> None:
    """What terms were made from may come before them, among them, or after all else."""
    donor, model = patched_model(1), patched_model(0)
    state = donor.state_dict()
    names = terms_of(state)
    rows = without(state, lambda key: not key.endswith("made_from"))
    some = without(state, lambda key: key.endswith("made_from") or key in names[1:])
    shards = [rows, some, {key: state[key] for key in names[1:]}]
    for i in order:
        model.load_state_dict(shards[i], strict=False)
    assert torch.equal(run(model), run(donor))


def test_what_shards_were_made_from_is_compared() -> None:
    """It comes last, and is that of other weights."""
    donor, other = patched_model(1).state_dict(), patched_model(2).state_dict()
    model = patched_model(0)
    rows = {key: tensor for key, tensor in other.items() if key.endswith("made_from")}
    model.load_state_dict(without(donor, lambda key: key.endswith("made_from")), strict=False)
    model.load_state_dict(rows, strict=False)
    with pytest.raises(StaleTermsError, match="made from other weights"):
        run(model)


def test_trained_terms_may_come_by_themselves() -> None:
    """As who saves what is trained alone has them."""
    model, donor = undropped(), undropped()
    for each in (model, donor):
        patch(each, method="svd", train="terms")
    names = [name for name, p in donor.named_parameters() if ".score_bias." in name]
    with torch.no_grad():
        for name in names:
            donor.get_parameter(name).mul_(1.5)
    trained = {name: donor.get_parameter(name).detach() for name in names}
    assert not torch.equal(run(model), run(donor))
    model.load_state_dict(trained, strict=False)
    assert torch.equal(run(model), run(donor))


def floats(state: State) -> State:
    """What of trained terms are parameters."""
    names = ("layout", "made_from")
    return {k: t for k, t in state.items() if ".score_bias." in k and not k.endswith(names)}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_trained_terms_may_be_split_too(order: tuple[int, ...]) -> None:
    donor, model = undropped(), undropped()
    for each in (donor, model):
        patch(each, method="svd", train="terms")
    with torch.no_grad():
        for name in floats(donor.state_dict()):
            donor.get_parameter(name).mul_(1.5)
    state = donor.state_dict()
    assert not torch.equal(run(model), run(donor))
    shards = [floats(state), {k: t for k, t in state.items() if k not in floats(state)}]
    for i in order:
        model.load_state_dict(shards[i], strict=False)
    assert torch.equal(run(model), run(donor))


def test_placeholders_of_trained_terms_wait_for_all() -> None:
    donor = undropped()
    plan = patch(donor, method="svd", train="terms")
    model = undropped()
    apply_plan(model, plan, recipes=[TOY], backend="sdpa", empty=True, train="terms")
    some = {k: t for k, t in floats(donor.state_dict()).items() if k.endswith("phi_q")}
    assert some
    model.load_state_dict(some, strict=False)
    with pytest.raises(StaleTermsError, match=WAITS):
        run(model)


def test_terms_stay_behind_when_weights_come_again() -> None:
    """Two loads are no shards of one: their weights have the same names."""
    first, second = patched_model(1).state_dict(), patched_model(2).state_dict()
    rest = without(second, lambda key: key in terms_of(second))
    for lost in ("made_from", "layout"):
        model = patched_model(0)
        model.load_state_dict(
            without(first, lambda key, lost=lost: key.endswith(lost)), strict=False
        )  # type: ignore[misc]
        model.load_state_dict(rest, strict=False)
        with pytest.raises(StaleTermsError, match=WAITS):
            run(model)
    # weights, and what others were made from, one after the other
    model = patched_model(0)
    model.load_state_dict(without(first, lambda key: key.endswith("made_from")), strict=False)
    model.load_state_dict({k: t for k, t in rest.items() if ".score_bias." not in k}, strict=False)
    rows = {k: t for k, t in rest.items() if k.endswith("made_from")}
    model.load_state_dict(rows, strict=False)
    with pytest.raises(StaleTermsError, match=WAITS):
        run(model)


def test_memory_that_was_given_up_forgets_what_came() -> None:
    donor = patched_model(1)
    state = donor.state_dict()
    names = terms_of(state)
    model = patched_model(0)
    model.load_state_dict(without(state, lambda key: key in names), strict=False)
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict({key: state[key] for key in names}, strict=False)
    with pytest.raises(StaleTermsError, match=WAITS):
        run(model)
    model.load_state_dict(state)
    assert torch.equal(run(model), run(donor))


def test_models_that_earlier_releases_pickled_are_loaded_into() -> None:
    model, donor = patched_model(0), patched_model(1)
    for module in model.modules():
        for name in ("_came", "_weights", "_lacks_rows", "partly_loaded"):
            module.__dict__.pop(name, None)
    model.load_state_dict(donor.state_dict())
    assert torch.equal(run(model), run(donor))

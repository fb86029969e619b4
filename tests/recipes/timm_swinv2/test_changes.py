"""Training, and changes after patching: what is followed, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashbias_convert import unpatch_model
from flashbias_convert.errors import StaleTermsError
from tests.support import assert_parity

from .models import check_model, image, make, nearby, patch, run, true_output


def test_training_equals_the_original_with_gradients_to_the_bias() -> None:
    model = make(drop_path_rate=0.2, attn_drop_rate=0.1, proj_drop_rate=0.1).train()
    reference = copy.deepcopy(model)
    patch(model)
    for each in (model, reference):
        torch.manual_seed(4)
        each(image()).square().sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, theirs[name].grad), name
    assert float(model.layers[0].blocks[0].attn.cpb_mlp[2].weight.grad.abs().max()) > 0


@pytest.mark.filterwarnings("ignore:a converted attention module runs in eval mode")
def test_gradients_in_eval_mode_reach_all_but_the_bias() -> None:
    model = make()
    reference = copy.deepcopy(model)
    patch(model)
    for each in (model, reference):
        each(image()).square().sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if "cpb_mlp" in name:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        largest = float(theirs[name].grad.abs().max())
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4 * largest)


def test_a_changed_logit_scale_is_noticed() -> None:
    model = make()
    patch(model)
    with torch.no_grad():
        model.layers[0].blocks[1].attn.logit_scale.add_(0.7)
    with pytest.raises(StaleTermsError):
        run(model, image())


def change_weights(model: Any) -> None:
    state = make().state_dict()
    model.load_state_dict({k: v * 1.1 for k, v in state.items()}, strict=False)


def change_window(model: Any) -> None:
    model.set_input_size(img_size=(32, 32), window_size=4)


def change_one_window(model: Any) -> None:
    model.layers[0].blocks[0].attn.set_window_size((4, 16))


def change_pretrained_window(model: Any) -> None:
    model.layers[0].blocks[0].attn.pretrained_window_size = (4, 4)


@pytest.mark.parametrize(
    "change", [change_weights, change_window, change_one_window, change_pretrained_window]
)
def test_terms_of_another_bias_are_refused(change: Callable[[Any], None]) -> None:
    model = make()
    patch(model)
    change(model)
    with pytest.raises(StaleTermsError, match="WindowAttention have changed"):
        run(model, image())


def test_a_new_window_works_after_patching_again() -> None:
    """Terms of 64 tokens, and windows of 100."""
    model = make()
    patch(model)
    model.set_input_size(img_size=(40, 40), window_size=(10, 10))
    with pytest.raises(StaleTermsError, match="WindowAttention have changed"):
        run(model, image(40, 40))
    unpatch_model(model)
    assert {site.n for site in check_model(model, image(40, 40)).sites} == {100}


@pytest.mark.parametrize("size", [(64, 32), (48, 48), (16, 64)])
def test_the_same_window_on_another_map_needs_no_new_terms(size: tuple[int, int]) -> None:
    model = make(always_partition=True)
    patch(model)
    model.set_input_size(img_size=size, window_size=8, always_partition=True)
    x = image(*size)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(run(model, x), run(plain, x), true_output(plain, x), nearby=nearby(plain, x))

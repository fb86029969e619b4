"""Shift masks of timm's SwinV2: the planned one, others, none, and changed ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashbias_convert import unpatch_model
from flashbias_convert.terms import Dense, Regions
from tests.support import assert_parity

from .models import (
    check_attention,
    image,
    make,
    nearby,
    patch,
    run,
    shifted_block,
    true_output,
    window_tokens,
)


def test_the_windows_that_the_shift_mask_affects_are_right() -> None:
    model, block, attn = shifted_block()
    patch(model)
    mask = block.attn_mask
    affected = mask.flatten(1).any(1).nonzero().flatten()
    assert len(affected) == 3 and len(mask) == 4
    rows = torch.cat([affected, affected + 4])
    check_attention(attn, mask, rows)
    with pytest.raises(AssertionError, match="error"):
        x = window_tokens()
        with torch.no_grad():
            wide = copy.deepcopy(attn)
            unpatch_model(wide)
            masked = wide(x, mask)[rows]
            truth = wide.double()(x.double(), mask.double())[rows]
            assert_parity(attn(x)[rows], masked, truth)


def test_masks_of_neighbouring_images_are_not_mixed_up() -> None:
    model, block, attn = shifted_block()
    patch(model)
    x = window_tokens(12)
    with torch.no_grad():
        together = attn(x, block.attn_mask)
        apart = torch.cat([attn(part, block.attn_mask) for part in x.split(4)])
    assert torch.allclose(together, apart, atol=1e-6)


def test_a_mask_that_differs_from_the_planned_one_is_used_as_it_comes() -> None:
    model, block, attn = shifted_block()
    patch(model)
    check_attention(attn, block.attn_mask)
    check_attention(attn, block.attn_mask.flip(0))
    check_attention(attn, block.attn_mask / 50)
    check_attention(attn, torch.randn(4, 64, 64))
    check_attention(attn, block.attn_mask[:2])
    check_attention(attn, block.attn_mask)


def test_without_a_mask_the_planned_one_is_left_out() -> None:
    model, _, attn = shifted_block()
    patch(model)
    assert attn.score_bias.planned_regions() is not None
    check_attention(attn, None)


def test_a_mask_where_none_was_planned_is_used() -> None:
    model, block, _ = shifted_block()
    patch(model)
    unshifted = model.layers[0].blocks[0].attn
    assert unshifted.score_bias.planned_regions() is None
    check_attention(unshifted, block.attn_mask)


def test_a_mask_that_is_changed_in_place_is_looked_at_again() -> None:
    model, block, attn = shifted_block()
    patch(model)
    check_attention(attn, block.attn_mask)
    block.attn_mask.copy_(block.attn_mask.flip(0))
    check_attention(attn, block.attn_mask)


def test_a_mask_is_compared_once_per_object(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block, attn = shifted_block()
    patch(model, backend="sdpa", method="svd", energy=0.99)
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *args: compared.append(1) or equal(*args))
    with torch.no_grad():
        for _ in range(3):
            attn(window_tokens(), block.attn_mask)
        assert len(compared) == 1
        attn(window_tokens(), block.attn_mask.clone())
        assert len(compared) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_has_seen_masks_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    model = make()
    patch(model)
    expected = run(model, image())
    twin = duplicate(model)
    assert torch.equal(run(twin, image()), expected)
    twin.layers[0].blocks[1].attn_mask.zero_()
    assert not torch.equal(run(twin, image()), expected)
    assert torch.equal(run(model, image()), expected)


def test_a_mask_of_another_form_stays_dense_and_is_told() -> None:
    model, block, attn = shifted_block()
    block.attn_mask.copy_(torch.randn(4, 64, 64))
    x = image()
    plain, truth = run(model, x), true_output(model, x)
    plan = patch(model)
    assert attn.score_bias.planned_regions() is None
    assert any("dense term" in warning for warning in plan.sites[1].warnings)
    assert_parity(run(model, x), plain, truth, nearby=nearby(model, x))


def test_the_planned_mask_takes_the_form_of_regions() -> None:
    model, block, attn = shifted_block()
    patch(model)
    term = attn.score_bias.planned_regions()
    assert isinstance(term, Regions) and term.ids.shape == (4, 64)
    assert torch.equal(term.dense(64, 64).squeeze(1), block.attn_mask)
    assert not any(isinstance(term, Dense) for term in attn.score_bias.bias.terms)

"""The comparison that all parity tests rely on must be able to fail."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import Float64Throughout, Nearby, assert_parity, nudged


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_accepts_an_error_like_the_plain_one(truth: torch.Tensor) -> None:
    assert_parity(truth.float() + 1e-3, truth.float() + 1e-3, truth)


def test_refuses_three_times_the_plain_error(truth: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="largest error"):
        assert_parity(truth.float() + 3e-3, truth.float() + 1e-3, truth)


def test_refuses_a_spread_out_error_that_no_single_value_shows(truth: torch.Tensor) -> None:
    plain = truth.float()
    plain[0] += 1e-3
    with pytest.raises(AssertionError, match="root_mean_square error"):
        assert_parity(truth.float() + 1e-3, plain, truth)


def draws(truth: torch.Tensor, *errors: float) -> Nearby:
    """Plain values with these errors, one after the other, and the last one from then on."""
    return lambda number: (truth.float() + errors[min(number, len(errors)) - 1], truth)


def test_a_lucky_draw_of_the_plain_error_is_not_the_last_word(truth: torch.Tensor) -> None:
    actual, plain = truth.float() + 3e-3, truth.float() + 1e-3
    assert_parity(actual, plain, truth, nearby=draws(truth, 1e-3, 2e-3))


def test_more_draws_do_not_excuse_what_none_of_them_shows(truth: torch.Tensor) -> None:
    actual, plain = truth.float() + 3e-3, truth.float() + 1e-3
    with pytest.raises(AssertionError, match="in 9 draws"):
        assert_parity(actual, plain, truth, nearby=draws(truth, 1e-3))


def test_draws_must_be_finite(truth: torch.Tensor) -> None:
    actual, plain = truth.float() + 3e-3, truth.float() + 1e-3
    with pytest.raises(AssertionError, match="not finite"):
        assert_parity(actual, plain, truth, nearby=draws(truth, math.nan))


def test_a_nudged_model_is_another_by_rounding_alone() -> None:
    model = torch.nn.Linear(40, 30).half()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(0.5, 4.0, 1200).reshape(30, 40))
    before = model.weight.detach().clone()
    twin = nudged(model, 1)
    assert torch.equal(model.weight, before)
    steps = (twin.weight - before).abs() / (before.abs() * torch.finfo(torch.half).eps)
    assert 0.4 < steps.count_nonzero().item() / steps.numel() < 0.9 and steps.max().item() <= 2
    assert torch.equal(nudged(model, 1).weight, twin.weight)
    assert not torch.equal(nudged(model, 2).weight, twin.weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_refuses_values_that_are_not_finite(truth: torch.Tensor, bad: float, where: int) -> None:
    three = [truth.float(), truth.float(), truth.clone()]
    three[where][3] = bad
    with pytest.raises(AssertionError, match="not finite"):
        assert_parity(*three)


def test_refuses_a_shape_that_would_broadcast(truth: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="shapes"):
        assert_parity(truth.float(), truth.float(), truth[None].expand(2, -1))


def test_a_truth_is_not_rounded_on_its_way(truth: torch.Tensor) -> None:
    scores = 300 + truth
    exact = torch.softmax(scores, -1)

    def through_float32() -> list[torch.Tensor]:
        return [
            torch.softmax(scores.float(), -1).double(),
            torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).double(),
            scores.softmax(-1, dtype=torch.float32).double(),
        ]

    assert not any(torch.equal(found, exact) for found in through_float32())
    with Float64Throughout():
        assert all(torch.equal(found, exact) for found in through_float32())
        assert truth.half().float().dtype == torch.float32  # of others it is none of its business

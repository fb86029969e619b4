"""The comparison that all parity tests rely on must be able to fail."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import Float64Throughout, assert_parity


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

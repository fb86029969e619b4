"""Factors by a randomised SVD: as good as a full one, and only where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashbias_convert import DecompositionError, UsageError
from flashbias_convert.decompose import measure, row_center, svd_factors
from flashbias_convert.decompose.costs import affordable_rank
from flashbias_convert.decompose.randomised import decompose_quickly, quick_factors
from flashbias_convert.terms import LowRank

pytestmark = pytest.mark.usefixtures("prices")
N = 48


def decaying(rate: float, heads: int = 2, batch: int = 2) -> Tensor:
    """Singular values 1, rate, rate squared, ..., times N, and rows that are far from centred."""
    generator = torch.Generator().manual_seed(0)
    u, v = (
        torch.linalg.qr(torch.randn(batch, heads, N, N, generator=generator))[0] for _ in range(2)
    )
    rows = 10 * torch.randn(batch, heads, N, 1, generator=generator)
    return N * u * rate ** torch.arange(N) @ v.mT + rows


def test_it_is_nearly_the_best_of_its_rank() -> None:
    bias = decaying(0.7)
    (term,) = decompose_quickly(bias, rank=6).bias.terms
    assert isinstance(term, LowRank) and term.head_ranks() == (6, 6)
    centred = row_center(bias.double())
    best = torch.linalg.svdvals(centred)[..., 6:].square().sum(-1)
    lost = row_center(term.dense(N, N, dtype=torch.float64) - centred).square().sum((-2, -1))
    assert (lost <= 1.01 * best).all() and (lost >= best * (1 - 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_nothing(dtype: torch.dtype) -> None:
    """It would take the products to half precision: models call it in the middle of a forward."""
    bias = decaying(0.7)
    wanted, factors = decompose_quickly(bias), quick_factors(bias, 6)
    with torch.autocast("cpu", dtype):
        made, again = decompose_quickly(bias), quick_factors(bias, 6)
    assert made.decisions == wanted.decisions
    for found, right in ((made.bias.terms[0], wanted.bias.terms[0]), (again, factors)):
        assert all(torch.equal(t, right.tensors()[name]) for name, t in found.tensors().items())


def test_ranks_are_those_of_a_full_svd_before_they_are_filled() -> None:
    bias = decaying(0.7)
    made = decompose_quickly(bias, energy=0.99)
    wanted = svd_factors(bias, energy=0.99).head_ranks()
    for decision, rank in zip(made.decisions, wanted, strict=True):
        assert decision.term == "low_rank" and f"({rank} would do" in decision.reason
        assert decision.rank is not None and decision.rank >= rank
    loss = measure(bias, made.bias.dense(N, N)).worst_over_batch()
    assert loss.energy.tolist() == pytest.approx([d.energy for d in made.decisions])
    assert all(d.energy >= 0.99 for d in made.decisions)


def test_heads_are_decided_one_by_one() -> None:
    """Of low rank, of none, and constant along rows; the batch's worst entry decides."""
    bias = torch.cat([decaying(0.5, 1), decaying(1.0, 1), torch.ones(2, 1, N, N)], 1)
    made = decompose_quickly(bias)
    assert [d.term for d in made.decisions] == ["low_rank", "dense", "none"]
    dense = made.bias.dense(N, N)
    assert torch.equal(dense[:, 1], bias[:, 1])
    assert measure(bias, dense).energy[:, 0].min() >= 0.99
    worst = decaying(0.5, 1)
    worst[1] = decaying(1.0, 1)[1]
    assert decompose_quickly(worst).decisions[0].term == "dense"


def test_attention_errors_are_a_guard() -> None:
    bias = 30 * decaying(0.7)
    assert decompose_quickly(bias, energy=0.9).decisions[0].term == "low_rank"
    strict = decompose_quickly(bias, energy=0.9, max_attention_error=1e-4)
    assert strict.decisions[0].term == "dense"


def test_a_rank_that_does_not_pay_is_not_used() -> None:
    bias = decaying(0.9)
    most = affordable_rank(N, N)
    assert 0 < most < N
    assert {d.term for d in decompose_quickly(bias, rank=most).decisions} == {"low_rank"}
    assert {d.term for d in decompose_quickly(bias, rank=most + 1).decisions} == {"dense"}
    assert decompose_quickly(bias, energy=1.0).decisions[0].term == "dense"


def test_the_random_numbers_of_the_caller_stay() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = decompose_quickly(decaying(0.7)).bias.terms[0]
    assert torch.equal(torch.rand(3), expected)
    again = decompose_quickly(decaying(0.7)).bias.terms[0]
    pairs = zip(first.tensors().values(), again.tensors().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    bias = decaying(0.5).to(dtype)
    assert {d.term for d in decompose_quickly(bias).decisions} == {"low_rank"}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="rank"):
        decompose_quickly(decaying(0.5), rank=0)
    with pytest.raises(UsageError, match="energy"):
        decompose_quickly(decaying(0.5), energy=1.5)
    broken = decaying(0.5)
    broken[0, 0, 0, 0] = torch.nan
    with pytest.raises(DecompositionError, match="site_a"):
        decompose_quickly(broken, name="site_a")

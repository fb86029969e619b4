"""Columns of factors that half precision carries as two parts: what they cost a choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashbias_convert.decompose import HeadDecision, decompose, expected_gain
from flashbias_convert.options import DecomposeOptions

pytestmark = pytest.mark.usefixtures("prices")
N = 48


def noise(seed: int) -> torch.Tensor:
    return torch.randn(1, N, N, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int) -> torch.Tensor:
    """All singular values count alike, and there are no others."""
    u, v = (torch.linalg.qr(noise(seed)[..., :rank]).Q for seed in (0, 1))
    return N * u @ (v - v.mean(-2, keepdim=True)).mT


def test_columns_in_two_parts_cost_what_the_kernel_makes_of_them(prices: dict[str | int, float]):
    """Factors that lose nothing are rounded less: rank 20 is 60 columns in half precision."""
    exact = of_rank(20)
    tail = exact + 0.2 * noise(2)
    (split,) = decompose(exact, DecomposeOptions(fill=False)).decisions
    assert split.term == "dense" and "rank 20 (padded 64): 6 ps" in split.reason  # and not 2
    prices["dense"] = 7
    (split,) = decompose(exact, DecomposeOptions(fill=False)).decisions
    assert (split.term, split.rank, split.split, split.columns()) == ("low_rank", 20, 20, 60)
    assert HeadDecision.from_json(split.to_json()) == split
    (whole,) = decompose(tail, DecomposeOptions(fill=False, max_attention_error=1)).decisions
    assert (whole.term, whole.split) == ("low_rank", 0) and whole.columns() == whole.rank
    sizes = (N, N, 32)
    assert expected_gain([split], [], *sizes) == expected_gain(
        [dataclasses.replace(split, rank=60, split=0)], [], *sizes
    )


def test_heads_pay_for_the_split_of_those_beside_them_alone():
    """A head that is too dear as factors must not make those of others dear."""
    tail = [of_rank(20) + 0.2 * noise(2 + at) for at in range(3)]
    options = DecomposeOptions(fill=False, max_attention_error=1)
    found = decompose(torch.cat([of_rank(40), *tail]), options)
    assert [d.term for d in found.decisions] == ["dense"] + ["low_rank"] * 3
    assert [d.split for d in found.decisions] == [0] * 4 and found.bias.terms[0].split == 0
    # one that stays splits columns of all, and all pay for that
    found = decompose(torch.cat([of_rank(5), *tail]), options)
    first, *others = found.decisions
    assert first.term == "low_rank" and first.columns() == 15
    low = next(term for term in found.bias.terms if term.kind == "low_rank")
    assert low.split == 5 and {d.split for d in others if d.term == "low_rank"} <= {5}

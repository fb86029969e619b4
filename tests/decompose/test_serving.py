"""Factors that have to be made first are used where all calls save more than that takes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from flashbias_convert.decompose import factor_times, pair_forms, randomised, serving
from flashbias_convert.decompose.factor_times import factors_ms, read_times
from flashbias_convert.decompose.pair_forms import PairSite, forms_in_words
from flashbias_convert.decompose.randomised import decompose_quickly
from flashbias_convert.decompose.serving import Serving, Site, calls_to_pay

Prices = dict[str | int, float]

N = 48
#: of 16 columns, which cost 4 ps per score less than the bias does, for 2 heads
SAVED_MS = 1e-9 * 4 * N * N * 2


def few_values(*ranks: int) -> Tensor:
    """A head for each: so many singular values of 1, and little beside them.

    Without that half precision would lose more by rounding factors than they leave out, and would
    carry each column as two parts.
    """
    draw = torch.Generator().manual_seed(0)
    heads = []
    for rank in ranks:
        u, v = (torch.linalg.qr(torch.randn(1, N, rank, generator=draw)).Q for _ in range(2))
        rest = 0.05 * rank**0.5 / N * torch.randn(1, N, N, generator=draw)
        bias = u @ (v - v.mean(-2, keepdim=True)).mT + rest
        heads.append(N * bias)
    return torch.cat(heads)[None]


def constant(monkeypatch: pytest.MonkeyPatch, spent: float) -> list[tuple[int, int, int, int]]:
    """All factors take so long; what was asked for."""
    asked = []

    def ms(matrices: int, n: int, m: int, rank: int, card: str | None) -> float:
        asked.append((matrices, n, m, rank))
        return spent

    monkeypatch.setattr(serving, "factors_ms", ms)
    return asked


def no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomised, "_truncated", lambda *_: pytest.fail("an SVD was made"))


def test_factors_pay_from_some_call_on(prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of all rows together pay for the SVD; one call less, and it is not made."""
    asked = constant(monkeypatch, 1000.5 * 3 * SAVED_MS)
    bias = few_values(4, 4)
    made = decompose_quickly(bias, serving=Serving(calls=1001, rows=3))
    assert [d.term for d in made.decisions] == ["low_rank"] * 2 and not made.in_vain
    assert set(asked) == {(2, N, N, rank) for rank in (16, 32)}
    no_svd(monkeypatch)
    for rows, calls in ((3, 1000), (2, 1001)):
        made = decompose_quickly(bias, serving=Serving(calls, rows))
        assert torch.equal(made.bias.dense(N, N), bias) and not made.in_vain
        saved, spent = calls * rows * SAVED_MS, 1000.5 * 3 * SAVED_MS
        for decision in made.decisions:
            assert decision.term == "dense"
            assert decision.reason.endswith(
                f"factors of rank 16 would save {saved:.3g} ms in {calls} calls, "
                f"and take {spent:.3g} ms to make"
            )


@pytest.mark.usefixtures("prices")
def test_a_rank_that_is_asked_for_has_to_pay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    constant(monkeypatch, 1000.5 * SAVED_MS)
    bias = few_values(20, 20)
    made = decompose_quickly(bias, rank=16, serving=Serving(1001))
    assert [d.rank for d in made.decisions] == [16, 16]
    no_svd(monkeypatch)
    (decision, _) = decompose_quickly(bias, rank=16, serving=Serving(1000)).decisions
    assert decision.term == "dense" and "and take" in decision.reason
    (decision, _) = decompose_quickly(bias, rank=48, serving=Serving(10**9)).decisions
    assert decision.reason.endswith("factors of rank 48 cost a kernel no less")  # 6 ps, not 5


@pytest.mark.usefixtures("prices")
def test_no_more_columns_are_looked_for_than_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 32 would save 3 ps per score, and take three times as long to find as rank 16."""
    monkeypatch.setattr(serving, "factors_ms", lambda *a: SAVED_MS * {16: 10, 32: 30}[a[3]])
    bias = few_values(4, 20)
    made = decompose_quickly(bias, serving=Serving(50))  # 37.5 saved
    assert [d.term for d in made.decisions] == ["low_rank"] * 2
    made = decompose_quickly(bias, serving=Serving(38))  # 28.5, and for rank 16 19 of one head
    assert [d.term for d in made.decisions] == ["low_rank", "dense"] and not made.in_vain
    made = decompose_quickly(bias, serving=Serving(18))  # 18, and 9 of one head
    assert [d.term for d in made.decisions] == ["dense"] * 2 and made.in_vain
    why = f"factors of 1 of 2 heads would save {9 * SAVED_MS:.3g} ms in 18 calls"
    assert why in made.decisions[0].reason and "less energy" in made.decisions[1].reason
    assert torch.equal(made.bias.dense(N, N), bias)
    no_svd(monkeypatch)
    made = decompose_quickly(bias, serving=Serving(18, in_vain=True))
    assert "did not pay" in made.decisions[0].reason


@pytest.mark.usefixtures("prices")
def test_heads_without_a_term_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are constant along their rows, and need no factors; batches count as matrices."""
    asked = constant(monkeypatch, 1000.5 * SAVED_MS)
    bias = torch.cat([few_values(4, 4), torch.ones(1, 1, N, N)], 1).expand(2, -1, -1, -1)
    no_svd(monkeypatch)
    made = decompose_quickly(bias, serving=Serving(1000))
    assert [d.term for d in made.decisions] == ["dense", "dense", "none"]
    assert {matrices for matrices, *_ in asked} == {4}


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize("card", [None, "cpu", "nobody's"])
def test_cards_that_were_not_measured_keep_the_bias(
    card: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert factors_ms(1, N, N, 16, card) == math.inf
    no_svd(monkeypatch)
    bias = few_values(4, 4)
    for rank in (None, 4):
        made = decompose_quickly(bias, rank=rank, serving=Serving(10**12, card=card))
        assert torch.equal(made.bias.dense(N, N), bias)
        assert f"was not measured on {card or 'cards like this'}" in made.decisions[0].reason


def test_calls_to_pay(prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "factors_ms", lambda *a: SAVED_MS * (1000.5 if a[3] < 30 else 800))
    assert calls_to_pay(2, N, N) == (16, 1001)  # rank 32 saves 3 of 4 ps: 1066
    for calls, pays in ((1001, 16), (1000, 0)):
        assert Site(1, 2, N, N, None, Serving(calls)).paying_rank() == pays
    assert calls_to_pay(2, N, N, card="nobody's") is None
    prices["dense"] = 0.5
    assert calls_to_pay(2, N, N) is None


def test_plans_say_from_when_on_an_svd_pays(
    prices: Prices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_forms, "LENGTHS", ())
    constant(monkeypatch, 12344.5 * SAVED_MS)
    told = (
        "(factors_once: at 48 tokens its SVD pays from about 12,000 calls x batch on, at rank 16)"
    )
    assert told in forms_in_words(N, N, PairSite(2))
    monkeypatch.setattr(serving, "is_measured", lambda card: False)
    assert "once per structure (factors_once);" in forms_in_words(N, N, PairSite(2))


# -- times ---------------------------------------------------------------------------------

TABLE = """heads,n,rank,ms,class
4,100,16,10,ada
4,100,32,20,ada
16,100,16,30,ada
16,400,16,60,ada
16,400,48,100,ada
16,100,16,999,hopper
"""


@pytest.mark.parametrize(
    ("matrices", "n", "m", "rank", "ms"),
    [
        (4, 100, 100, 16, 10), (4, 100, 100, 24, 15), (4, 100, 100, 4, 10), (4, 100, 100, 64, 40),
        (10, 100, 100, 16, 20), (1, 100, 100, 16, 10), (32, 100, 100, 16, 60),
        (16, 400, 400, 32, 80), (16, 250, 250, 16, 45), (16, 50, 50, 16, 30),
        (16, 800, 800, 16, 240), (16, 1600, 100, 16, 60), (4, 200, 200, 16, 40),
    ],
)  # fmt: skip
def test_times_between_measured_ones(
    matrices: int, n: int, m: int, rank: int, ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond them, with the square of the length, and in proportion to ranks and heads."""
    monkeypatch.setattr(factor_times, "_table", lambda card: read_times(TABLE, card))
    assert factors_ms(matrices, n, m, rank, "ada") == pytest.approx(ms)


def test_the_measured_times_make_sense() -> None:
    """Whatever they are at present: positive, and not for nothing at any size."""
    assert factor_times.is_measured("hopper") and not factor_times.is_measured("cpu")
    for heads, n, rank in itertools.product((1, 4, 7, 16, 64), (16, 256, 1000, 8192), (1, 16, 256)):
        assert 0 < factors_ms(heads, n, n, rank, "hopper") < math.inf

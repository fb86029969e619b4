"""Which form of a bias made in each call is fastest at which length, by measured costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashbias_convert.decompose import costs, pair_forms, pair_times
from flashbias_convert.decompose.pair_forms import (
    STARTS,
    PairSite,
    affordable_rank,
    forms,
    forms_in_words,
    networks_in_words,
)
from flashbias_convert.decompose.pair_times import Pairs

TRIANGLE = PairSite(4, 32, Pairs(128, "linear", rows=None))
PAIR_BIAS = PairSite(16, 24, Pairs(128, "norm and linear"))
UNKNOWN = PairSite(4, 32)
SITES = {"triangle": TRIANGLE, "pair bias": PAIR_BIAS, "unknown": UNKNOWN}


@pytest.mark.parametrize("head_dim", [None, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [24, 384, 2048, 10_000])
def test_the_affordable_rank_is_the_last_that_pays(n: int, head_dim: int | None) -> None:
    rank = affordable_rank(n, n, head_dim)
    assert rank in (0, *costs.BUCKETS)
    dense = costs.added_cost("dense", n, n, head_dim=head_dim)
    if rank:
        assert costs.added_cost("low_rank", n, n, rank, head_dim) < dense
    assert costs.added_cost("low_rank", n, n, rank + 1, head_dim) >= dense or rank >= n


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
@pytest.mark.parametrize("n", [24, 384, 2048])
def test_forms_say_what_they_cost_up_to_the_rank_that_pays(n: int, site: PairSite) -> None:
    dense, once, fitted = forms(n, n, site)
    exact = costs.added_cost("dense", n, n, head_dim=site.head_dim)
    assert (dense["form"], dense["max_rank"], dense["ps_per_score"]) == ("dense", None, exact)
    assert (once["form"], fitted["form"]) == ("factors_once", "factor_network")
    rank = once["max_rank"]
    assert rank == affordable_rank(n, n, site.head_dim)
    assert once["ps_per_score"] == costs.added_cost("low_rank", n, n, rank or 16, site.head_dim)
    assert (once["ps_per_score"] < exact) == (rank != 0)
    columns = fitted["max_rank"] or 16
    assert fitted["ps_per_score"] == costs.added_cost("low_rank", n, n, columns, site.head_dim)
    times = [form["ms_per_call"] for form in (dense, once, fitted)]
    if site.pairs is None:
        assert times == [None, None, None] and fitted["max_rank"] == rank
        return
    assert times[0] is not None and times[1] is not None and times[2] is not None
    assert (times[2] < times[0]) == bool(fitted["max_rank"])
    scores = 1e-9 * site.pairs.rows_of(n) * site.heads * n * n
    made = pair_times.dense_ms(site.pairs, site.heads, n)
    assert times[0] == pytest.approx(made + scores * exact)
    assert times[1] == pytest.approx(scores * once["ps_per_score"])
    made = pair_times.networks_ms(site.pairs, site.heads, columns, n)
    assert times[2] == pytest.approx(made + scores * fitted["ps_per_score"])


def test_ranks_that_were_not_measured_count_as_too_dear() -> None:
    for rank in (costs.BUCKETS[-1] + 1, 1000):
        assert costs.added_cost("low_rank", 384, 384, rank, 32) == float("inf")
        assert PAIR_BIAS.networks_from(rank) is None


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
@pytest.mark.parametrize("rank", [16, 96])
def test_networks_begin_where_they_are_faster_ever_after(site: PairSite, rank: int) -> None:
    least = site.networks_from(rank)
    pay = [site.networks_pay(n, n, rank) for n in STARTS]
    at = len(STARTS) if least is None else STARTS.index(least)
    assert all(pay[at:]) and not (at and pay[at - 1])


def test_where_networks_pay_by_the_measurements_of_the_package() -> None:
    """As the README says."""
    assert PAIR_BIAS.networks_from(96) is None and PAIR_BIAS.networks_from(16) is None
    assert PairSite(16, 24, Pairs(16, "laying out")).networks_from(16) is None
    assert [TRIANGLE.networks_from(rank) for rank in (32, 64, 96)] == [2048, 3072, None]


def test_a_norm_of_their_own_is_counted() -> None:
    """OpenFold's rows of alignments: networks would win if it were for nothing."""
    own, free = (
        PairSite(8, 32, Pairs(128, "norm and linear", 512, normed=n)) for n in (True, False)
    )
    assert free.networks_from(32) == 3072 and own.networks_from(32) is None
    dearer = (own.networks_ms(1024, 1024, 32) or 0) - (free.networks_ms(1024, 1024, 32) or 0)
    assert dearer == pytest.approx(1.1, abs=0.2)


def test_more_queries_than_keys() -> None:
    """Scores are counted as they are; what makes a bias, by the longer side."""
    assert PAIR_BIAS.kernel_ms(512, 256) == pytest.approx(
        1e-9 * 16 * 512 * 256 * costs.added_cost("dense", 512, 256, head_dim=24)
    )
    for n, m in ((512, 256), (256, 512)):
        assert PAIR_BIAS.pairs is not None
        made = pair_times.dense_ms(PAIR_BIAS.pairs, 16, 512)
        assert PAIR_BIAS.dense_ms(n, m) == pytest.approx(made + (PAIR_BIAS.kernel_ms(n, m) or 0))
        made = pair_times.networks_ms(PAIR_BIAS.pairs, 16, 32, 512)
        own = PAIR_BIAS.kernel_ms(n, m, 32) or 0
        assert PAIR_BIAS.networks_ms(n, m, 32) == pytest.approx(made + own)


def test_networks_that_pay_in_between_do_not_begin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSite, "networks_pay", lambda self, n, m, rank: n in (384, 3072, 4096))
    assert PAIR_BIAS.networks_from(96) == 3072


Cost = Callable[..., float]


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The dense bias costs twice as much from 701 tokens on."""
    found = {"dense": 2.0}

    def cost(kind: str, n: int, m: int, rank: int = 0, head_dim: int | None = None) -> float:
        return found["dense"] * (2 if n > 700 else 1) if kind == "dense" else rank / 16

    monkeypatch.setattr(costs, "added_cost", cost)
    monkeypatch.setattr(pair_forms, "LENGTHS", (512, 1024))
    monkeypatch.setattr(pair_forms, "USUAL_RANK", 40)
    monkeypatch.setattr(pair_forms, "calls_to_pay", lambda *_: None)
    return found


def test_words_of_the_kernel_alone(prices: dict[str, float]) -> None:
    site = PairSite(2)
    assert forms_in_words(100, 100, site) == (
        "exact, 2 ps per score at 100 tokens; factors cost less up to rank 16 (16 at 512, 32 at "
        "1024): once per structure (factors_once); in the kernel alone, fitted networks of rank 40 "
        "(fit) are faster from 768 tokens on"
    )
    assert networks_in_words(100, 100, 16, site) is None
    assert networks_in_words(100, 100, 40, site) == (
        "its factors of rank 40 (padded 64) add 2.5 ps per score at 100 tokens, the bias as it is "
        "2 (the kernel alone: its recipe does not say what it is made of)"
    )
    prices["dense"] = 0.1
    assert forms_in_words(100, 90, site) == (
        "exact, 0.1 ps per score at 100 tokens; factors cost less at no rank, at no length; in the "
        "kernel alone, fitted networks of rank 40 are slower up to 4096 tokens"
    )


def test_words_of_all_that_a_call_does(
    prices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_times, "dense_ms", lambda pairs, heads, n: 1e-3 * n)
    monkeypatch.setattr(pair_times, "networks_ms", lambda pairs, heads, rank, n: 0.2)
    site = PairSite(2, 32, Pairs(8, "linear"))
    assert forms_in_words(100, 100, site).endswith(
        "; fitted networks of rank 40 (fit) are faster at any length"
    )
    assert networks_in_words(300, 300, 40, site) is None
    assert networks_in_words(100, 100, 40, site) == (
        "networks of rank 40 take 0.2 ms of a call at 100 tokens, with what their factors cost the "
        "kernel, and the bias as it is 0.1, estimated from times on Hopper"
    )
    assert networks_in_words(300, 300, 300, site) == (
        "no kernel takes factors of rank 300: at most 256"
    )

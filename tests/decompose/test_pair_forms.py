"""Up to which rank factors of a bias made in each call pay, by measured costs."""

from __future__ import annotations

import pytest

from flashbias_convert.decompose import costs, pair_forms
from flashbias_convert.decompose.pair_forms import (
    affordable_rank,
    forms,
    forms_in_words,
    networks_in_words,
)


@pytest.mark.parametrize("head_dim", [None, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [24, 384, 2048, 10_000])
def test_the_affordable_rank_is_the_last_that_pays(n: int, head_dim: int | None) -> None:
    rank = affordable_rank(n, n, head_dim)
    assert rank in (0, *costs.BUCKETS)
    dense = costs.added_cost("dense", n, n, head_dim=head_dim)
    if rank:
        assert costs.added_cost("low_rank", n, n, rank, head_dim) < dense
    assert costs.added_cost("low_rank", n, n, rank + 1, head_dim) >= dense or rank >= n


@pytest.mark.parametrize("n", [24, 384, 2048])
def test_forms_say_what_they_cost_up_to_the_rank_that_pays(n: int) -> None:
    dense, once, fitted = forms(n, n, 32)
    exact = costs.added_cost("dense", n, n, head_dim=32)
    assert dense == {"form": "dense", "max_rank": None, "ps_per_score": exact}
    assert (once["form"], fitted["form"]) == ("factors_once", "factor_network")
    rank = once["max_rank"]
    assert rank == affordable_rank(n, n, 32)
    assert once["ps_per_score"] == costs.added_cost("low_rank", n, n, rank or 16, 32)
    assert (once["ps_per_score"] < exact) == (rank != 0)
    assert {**fitted, "form": "factors_once"} == once


def test_ranks_that_were_not_measured_count_as_too_dear() -> None:
    for rank in (costs.BUCKETS[-1] + 1, 1000):
        assert costs.added_cost("low_rank", 384, 384, rank, 32) == float("inf")


def test_words_follow_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {"dense": 2.0}

    def cost(kind: str, n: int, m: int, rank: int = 0, head_dim: int | None = None) -> float:
        return prices["dense"] * (2 if n > 700 else 1) if kind == "dense" else rank / 16

    monkeypatch.setattr(costs, "added_cost", cost)
    monkeypatch.setattr(pair_forms, "LENGTHS", (512, 1024))
    assert forms_in_words(100, 100) == (
        "exact, 2 ps per score at 100 tokens; factors cost less up to rank 16 (16 at 512, 32 at "
        "1024): once per structure (factors_once), or fitted (fit)"
    )
    assert networks_in_words(100, 100, 16) is None
    assert networks_in_words(100, 100, 40) == (
        "its factors of rank 40 (padded 64) add 2.5 ps per score at 100 tokens, the bias as it is "
        "2; factors cost less up to rank 16 (in attention alone: networks take time, too, and save "
        "the projection of the pairs)"
    )
    prices["dense"] = 0.1
    assert forms_in_words(100, 90) == (
        "exact, 0.1 ps per score at 100 tokens; factors cost less at no rank, at no length"
    )

"""Prices that tests of the choice set themselves: measured ones change with every measurement."""

from __future__ import annotations

import pytest

from flashbias_convert.decompose import candidates, costs, truncations

Prices = dict[str | int, float]


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> Prices:
    """By kind, and by padded rank for factors; a test may change them."""
    found: Prices = {
        "none": 0, 16: 1, 32: 2, 64: 6, 128: 16, 256: 40, "diagonal": 1, "dense": 5,
        "relative_table": 9, "lookup": 5,
    }  # fmt: skip

    def cost(
        kind: str, n: int, m: int, rank: int = 0, head_dim: int | None = None, paired: bool = False
    ) -> float:
        assert n > 0 and m > 0
        if kind != "low_rank":
            return found[kind]
        bucket = costs.rank_bucket(rank)
        return found.get(bucket, 100.0) if bucket else 0.0

    for room in (candidates, costs, truncations):
        monkeypatch.setattr(room, "added_cost", cost)
    return found

"""What attention with a term costs, by the committed measurements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from flashbias_convert import RelativeTable
from flashbias_convert.decompose import HeadDecision, added_cost, costs, decompose, expected_gain
from flashbias_convert.decompose.candidates import exact_candidates
from flashbias_convert.decompose.costs import (
    BUCKETS,
    DENSE_SDPA,
    FORMS,
    PAIRS,
    PLAIN,
    RECKONED,
    SHARED_DENSE,
    TOGETHER,
    _table,
    is_measured,
    shared_dense_cost,
    time_per_score,
)
from flashbias_convert.decompose.gain import is_paired
from flashbias_convert.options import DecomposeOptions

KINDS = [*FORMS, *TOGETHER, *RECKONED]


def test_every_form_was_measured_at_every_size() -> None:
    forms = {PLAIN, DENSE_SDPA, PAIRS, *FORMS.values(), *(f"low_rank {b}" for b in BUCKETS)}
    forms |= {form for pair in TOGETHER.values() for form in pair}
    lengths = {tuple(n for n, _ in curve) for own in _table().values() for curve in own.values()}
    measured = [set(own) - {*RECKONED, SHARED_DENSE} for own in _table().values()]
    assert len(lengths) == 1 and all(own == forms for own in measured)
    assert all(ps > 0 for own in _table().values() for curve in own.values() for _, ps in curve)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, head_dim", [(1, 16), (64, 32), (600, 48), (2**20, 512), (577, None)])
def test_terms_cost_something_finite(kind: str, n: int, head_dim: int | None) -> None:
    assert 0 <= added_cost(kind, n, n, head_dim=head_dim) < math.inf
    assert 0 < time_per_score(PLAIN, n, n, head_dim) < math.inf


def test_ranks_cost_what_their_padding_costs() -> None:
    at = {"n": 576, "m": 576, "head_dim": 32}
    costs = [added_cost("low_rank", rank=rank, **at) for rank in (0, 1, 16, 17, 32, 33, 129, 257)]
    assert costs[0] == 0 < costs[1] == costs[2] < costs[3] == costs[4] < costs[5] < costs[6]
    assert costs[7] == math.inf
    assert added_cost("none", 576, 576) == 0
    with pytest.raises(ValueError, match="no cost is known"):
        added_cost("axial", 64, 64)


def test_more_columns_never_cost_less() -> None:
    for head_dim in _table():
        for n in (64, 144, 300, 4096):
            costs = [added_cost("low_rank", n, n, b, head_dim) for b in BUCKETS]
            assert costs == sorted(costs)


def test_between_measured_lengths_costs_lie_between() -> None:
    curve = _table()[32][PLAIN]
    for (n, low), (longer, high) in itertools.pairwise(curve):
        assert time_per_score(PLAIN, n, n, 32) == pytest.approx(low)
        between = time_per_score(PLAIN, round(math.sqrt(n * longer)), n, 32)
        assert min(low, high) <= between <= max(low, high)
    assert time_per_score(PLAIN, 1, 1, 32) == curve[0][1]
    assert time_per_score(PLAIN, 10**9, 10**9, 32) == curve[-1][1]


def test_the_gain_counts_every_head_and_mask() -> None:
    none: dict[str, Any] = {"energy": 1.0, "attention_error": 0.0, "reason": ""}
    none |= {"logit_error_max": 0.0, "logit_error_rms": 0.0}
    heads = [HeadDecision(0, "low_rank", 16, **none)]
    heads += [HeadDecision(1, "low_rank+diagonal", 20, **none)]
    at = (576, 576, 32)
    own = [added_cost("low_rank", *at[:2], 16, 32)]
    own += [added_cost("low_rank", *at[:2], 20, 32) + added_cost("diagonal", *at[:2], head_dim=32)]
    time = time_per_score(PLAIN, *at) + added_cost("regions", *at[:2], head_dim=32) + sum(own) / 2
    gain = expected_gain(heads, ["regions"], *at)
    assert gain == pytest.approx(time_per_score(DENSE_SDPA, *at) / time)
    bare = expected_gain([], [], *at)
    assert gain is not None and bare is not None and bare > gain
    assert expected_gain(heads, ["axial"], *at) is None


def test_shared_dense_biases_cost_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of them at other head sizes, and so they are never cheaper there."""
    plain, dense = _table()[32][PLAIN], dict(_table()[32]["dense"])
    curve = [(n, ps + 0.25 * (dense[n] - ps)) for n, ps in plain]
    without = {d: {f: c for f, c in forms.items() if f != SHARED_DENSE}
               for d, forms in _table().items()}  # fmt: skip
    table = {**without, 32: {**without[32], SHARED_DENSE: curve}}
    monkeypatch.setattr(costs, "_table", lambda: table)
    at = (576, 576, 32)
    assert shared_dense_cost(*at) == pytest.approx(added_cost("dense", 576, 576, head_dim=32) / 4)
    assert shared_dense_cost(576, 576, 64) == math.inf
    numbers = (None, 1.0, 0.0, 0.0, 0.0, "")
    own = [HeadDecision(head, "dense", *numbers) for head in range(2)]
    apart, together = (expected_gain(own, [], *at, shared) for shared in (False, True))
    assert apart is not None and together is not None and together > apart
    mixed = [own[0], HeadDecision(1, "none", *numbers)]
    assert expected_gain(mixed, [], *at, True) == expected_gain(mixed, [], *at)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_tables_whose_keys_come_in_pairs_cost_less(head_dim: int) -> None:
    at = {"n": 576, "m": 576, "head_dim": head_dim}
    alone, paired = (added_cost("relative_table", **at, paired=p) for p in (False, True))
    assert 0 < paired < alone
    own = HeadDecision(0, "relative_table", None, 1.0, 0.0, 0.0, 0.0, "")
    gains = [expected_gain([own], [], 576, 576, head_dim, paired=p) for p in (False, True)]
    assert gains[0] is not None and gains[1] is not None and gains[0] < gains[1]


@pytest.mark.parametrize(("window", "paired"), [((24, 24), True), ((8, 7, 7), False)])
def test_what_a_table_costs_follows_its_codes(window: tuple[int, ...], paired: bool) -> None:
    """An even number of keys is no sign of it: a window of 8 x 7 x 7 has one."""
    cells = torch.cartesian_prod(*(torch.arange(size) for size in window))
    spans = torch.tensor([2 * size - 1 for size in window])
    steps = spans.flip(0).cumprod(0).roll(1).flip(0)
    steps[-1] = 1
    code = ((cells[:, None] - cells[None] + torch.tensor(window) - 1) * steps).sum(-1)
    bias = torch.randn(1, int(spans.prod()))[:, code]
    found = decompose(bias, DecomposeOptions(method="exact"), index=code, head_dim=32)
    (term,) = found.bias.terms
    assert isinstance(term, RelativeTable) and term.pairs is paired and is_paired([term]) is paired
    n = len(cells)
    cost = added_cost("relative_table", n, n, head_dim=32, paired=paired)
    tables = [([0], term)]
    assert exact_candidates(bias, 0, tables, 32)[0].cost == cost


def test_what_was_not_measured_counts_as_the_dearest_that_it_is_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = HeadDecision(0, "lookup", None, 1.0, 0.0, 0.0, 0.0, "")
    without = {
        d: {f: c for f, c in forms.items() if f != "lookup"} for d, forms in _table().items()
    }
    monkeypatch.setattr(costs, "_table", lambda: without)
    at = {"n": 576, "m": 576, "head_dim": 32}
    assert not is_measured("lookup", 32) and is_measured("dense", 32)
    like = [added_cost(kind, **at) for kind in ("dense", "relative_table")]
    assert added_cost("lookup", **at) == max(like)
    assert expected_gain([own], [], 576, 576, 32) is None

    curve = [(n, ps + 1.0) for n, ps in without[32][PLAIN]]
    monkeypatch.setattr(costs, "_table", lambda: {32: {**without[32], "lookup": curve}})
    assert is_measured("lookup", 32)
    assert added_cost("lookup", **at) == pytest.approx(1.0)
    assert expected_gain([own], [], 576, 576, 32) is not None

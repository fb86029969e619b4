"""Who makes which of the calls that are shared out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashbias_convert.assignment import assigned
from flashbias_convert.inspection.groups import expected_work

from .checkpoint.models import tiny_model

COSTS = st.lists(st.floats(0, 1e6), max_size=12)


@given(COSTS, st.integers(1, 8))
def test_every_call_is_made_once_and_nobody_has_much_more_than_is_best(
    costs: list[float], parts: int
) -> None:
    found = assigned(costs, parts)
    assert len(found) == parts
    assert sorted(at for some in found for at in some) == list(range(len(costs)))
    most = max(sum(costs[at] for at in some) for some in found)
    # any order has at least the mean, the longest call, and two of the longest P + 1 on one process
    longest = sorted(costs, reverse=True)
    pair = longest[parts - 1] + longest[parts] if len(costs) > parts else 0.0
    best = max(sum(costs) / parts, max(costs, default=0.0), pair)
    assert most <= 4 / 3 * best * (1 + 1e-9) or most <= sum(costs) / parts + max(costs)


def test_the_longest_go_first_and_equals_in_turns() -> None:
    assert assigned([1.0, 4.0, 2.0, 3.0], 2) == [[1, 0], [3, 2]]
    assert assigned([1.0] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert assigned([0.0] * 3, 2) == [[0, 2], [1]]


def test_what_a_decomposition_costs_is_known_before() -> None:
    first, _, last = (m for m in tiny_model().modules() if hasattr(m, "cpb_mlp"))
    assert expected_work(first) == 1 * 64**3  # one head, windows of 8 x 8
    assert expected_work(last) == 2 * 64**3

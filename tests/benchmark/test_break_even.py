"""Where a conversion breaks even, and the synthetic calls that it is measured on."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.attention import flashbias_attention
from flashbias_convert.benchmark.break_even import crossing, lengths
from flashbias_convert.benchmark.peers import FLEX, NO_BIAS, OURS, SDPA
from flashbias_convert.benchmark.result import Point, Row, Status
from flashbias_convert.benchmark.synthetic import fixed_n, synthetic_call
from flashbias_convert.benchmark.timing import Times

from .calls import TERMS, make_call


def row(name: str, ms: float, status: Status = "measured") -> Row:
    return Row(name, status, times=Times(ms, ms, ms, 1))


def points(times: list[float], ours: Status = "measured", flex: Status = "measured") -> list[Point]:
    """At N = 16, 32, ...: ours, and two peers of which the first is slower."""
    found = []
    for i, ms in enumerate(times):
        rows = (
            row(OURS, ms, ours),
            row(SDPA, 5.0),
            row(FLEX, 1.0, flex),
            row(NO_BIAS, 0.01),
        )
        found.append(Point(16 << i, 1, rows))
    return found


@pytest.mark.parametrize(
    ("ours", "n", "text"),
    [
        ([2, 2, 0.5, 0.5], 64, "faster from N = 64 on, up to 128"),
        ([0.5, 0.5, 0.5], 16, "faster from the smallest measured N = 16 on, up to 64"),
        ([2, 2, 2], None, "not faster up to N = 64"),
        ([2, 0.5, 2], None, "not faster up to N = 64, though at N = 32"),
        ([0.5, 2, 0.5], 64, "faster from N = 64 on, up to 64"),
        ([1.0], None, "not faster up to N = 16"),
    ],
)
def test_the_crossing_is_where_ours_stays_faster(
    ours: list[float], n: int | None, text: str
) -> None:
    assert crossing(points(ours)) == (n, text)


def test_only_correct_rows_count() -> None:
    # a wrong peer is no peer: the slower, correct one is what must be beaten
    assert crossing(points([2, 2], flex="wrong"))[0] == 16
    assert crossing(points([0.5], ours="wrong"))[0] is None
    assert crossing(points([0.5], ours="failed"))[1].startswith("not known")
    assert crossing([])[1].startswith("not known")


def test_lengths_are_powers_of_two() -> None:
    assert lengths(100) == [16, 32, 64] and lengths(64) == [16, 32, 64] and lengths(15) == []


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("n", [16, 32])
def test_a_synthetic_call_has_the_same_kinds_of_terms(kind: str, n: int) -> None:
    call = make_call(TERMS[kind], batch=(3,), kv_heads=2)
    made = synthetic_call(call, n, 5)
    assert made.q.shape == (5, 4, n, 10) and made.k.shape == (5, 2, n, 10)
    (term,) = made.bias.terms
    assert made.kinds == (kind,) and term.num_own_heads() == TERMS[kind].num_own_heads()
    assert made.rank == call.rank
    assert (term.row_scale is None) == (TERMS[kind].row_scale is None)
    out = flashbias_attention(made.q, made.k, made.v, made.bias, backend="eager")
    assert bool(out.isfinite().all())
    # a bias that is nothing would make the peers' work easy
    assert float(made.bias.dense(n, n).std()) > 0
    again = synthetic_call(call, n, 5)
    assert torch.equal(made.q, again.q)


def test_only_alibi_takes_any_length() -> None:
    open_ended = [kind for kind in TERMS if not fixed_n(make_call(TERMS[kind]).bias)]
    assert open_ended == ["alibi"]

"""Quantiles, and how often a call is called; times themselves are not tested."""

from __future__ import annotations

import time

import pytest
import torch

from flashbias_convert.benchmark.timing import FEWEST, WARMUP, Times, measure

CPU = torch.device("cpu")


def test_quantiles_are_those_of_the_times() -> None:
    found = Times.of([float(ms) for ms in range(11)])
    assert (found.median_ms, found.p20_ms, found.p80_ms, found.repeats) == (5, 2, 8, 11)


def test_every_call_is_counted_and_the_first_is_looked_at() -> None:
    calls: list[int] = []
    looked: list[int] = []

    def call() -> int:
        calls.append(len(calls))
        return calls[-1]

    found = measure(call, CPU, repeats=5, look=looked.append)
    assert looked == [0] and found.times.repeats == 5
    assert len(calls) == 1 + WARMUP + 5
    assert found.peak_mib is None  # the CPU does not count memory, so no number is invented


def test_a_budget_ends_the_repeats() -> None:
    found = measure(lambda: time.sleep(0.002), CPU, repeats=1000, budget_s=0.0)
    assert found.times.repeats == FEWEST


def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, CPU, repeats=1)

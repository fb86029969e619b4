"""Any call: the formula in float64 is the truth, plain attention's own error the tolerance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashbias_convert.attention import PreparedBias, flashbias_attention
from tests.attention.cases import plain_of, truth_of
from tests.attention.conftest import INTERPRETED
from tests.support import assert_parity

from .amount import amount
from .calls import CallPlan, call_plans
from .conftest import Count

#: draws of one call that are judged together: the largest error of one is a matter of luck
FEW, MANY = 4, 32
CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def settled(few: int, many: int) -> settings:
    """The same examples in every run; speed is no matter."""
    return settings(
        max_examples=amount(few, many),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def compare(plan: CallPlan, backend: str, draws: int) -> None:
    """Raise AssertionError unless the backend is as exact as plain attention."""
    parts = []
    for seed in range(draws):
        x, bias, options = plan.draw(seed)
        actual = flashbias_attention(x.q, x.k, x.v, bias, backend=backend, **options)
        assert actual.dtype == plan.dtype
        parts.append((actual, plain_of(x, bias, **options), truth_of(x, bias, **options)))
    assert_parity(*(torch.stack(each) for each in zip(*parts, strict=True)))


def judge(plan: CallPlan, backend: str) -> None:
    """More draws decide where few do not agree: luck averages out, an error does not."""
    try:
        compare(plan, backend, FEW)
    except AssertionError:
        compare(plan, backend, MANY)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.skipif(INTERPRETED, reason="has run without the interpreter")
def test_any_call(backend: str, count: Count) -> None:
    tried: Counter[str] = Counter()

    @settled(few=50, many=500)
    @given(call_plans(CPU_DTYPES))
    def check(plan: CallPlan) -> None:
        tried[str(plan.dtype)] += 1
        judge(plan, backend)

    check()
    count("operator calls", backend, tried.total())


def test_any_call_of_the_kernel(kernel: str, count: Count) -> None:
    tried: Counter[str] = Counter()

    @settled(few=6, many=60)
    @given(call_plans((torch.float32, torch.float16), longest=40, max_terms=2))
    def check(plan: CallPlan) -> None:
        _, bias, _ = plan.draw(0)
        half = plan.dtype != torch.float32
        assume(bias is None or PreparedBias(bias).problem(half) is None)
        tried[str(plan.dtype)] += 1
        judge(plan, kernel)

    check()
    count("operator calls", "triton (interpreter)", tried.total())


@pytest.mark.skipif(INTERPRETED, reason="has run without the interpreter")
def test_the_truth_is_the_formula() -> None:
    """The yardstick is written twice; a tolerance that is derived from an error needs this."""

    @settled(few=40, many=400)
    @given(call_plans((torch.float64,), longest=20))
    def check(plan: CallPlan) -> None:
        x, bias, options = plan.draw(0)
        # plain attention takes its bias in fp32
        difference = plain_of(x, bias, **options) - truth_of(x, bias, **options)
        assert difference.abs().max() < 1e-4

    check()


@pytest.mark.skipif(INTERPRETED, reason="has run without the interpreter")
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_start_for_each_batch_entry(backend: str) -> None:
    """Equals one call for each entry, whatever the start is."""

    @settled(few=20, many=200)
    @given(call_plans((torch.float64,), longest=20), st.data())
    def check(plan: CallPlan, data: Any) -> None:
        x, bias, options = plan.draw(0)
        batch = plan.sizes["batch"]
        assume(batch and all(not any(s > 1 for s in t.batch) for t in plan.terms))
        options.pop("key_mask", None)
        starts = torch.tensor(
            data.draw(st.lists(st.integers(-2, x.m), min_size=batch[0], max_size=batch[0]))
        ).reshape(-1, *(1,) * (len(batch) - 1))
        options["query_start"] = starts
        whole = flashbias_attention(x.q, x.k, x.v, bias, backend=backend, **options)
        for i, start in enumerate(starts.flatten().tolist()):
            options["query_start"] = start
            one = slice(i, i + 1)
            part = flashbias_attention(
                x.q[one], x.k[one], x.v[one], bias, backend="eager", **options
            )
            assert torch.allclose(whole[one], part, rtol=0, atol=1e-12)

    check()

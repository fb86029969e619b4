"""Programs that share the keys of a row: the same result, whatever each of them sees.

Blocks are small here, so that a few hundred keys make several parts of several blocks; sizes are
such that the last block is ragged and, with more parts than blocks, some parts have no keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import Alibi, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, launch, operator
from flashbias_convert.attention.launch_plan import LaunchPlan
from flashbias_convert.attention.parted_plan import PartedPlan
from flashbias_convert.attention.parts import MOST_PARTS
from flashbias_convert.attention.tuning import LaunchSettings
from tests.support import assert_parity

from .cases import BIASES, Inputs, plain_of, truth_of
from .gradients import gradients, of_backend
from .test_quick_steps import steps

SMALL = LaunchSettings(16, 32, 4, 2)
#: four blocks of keys, the last with 5
SIZES: dict[str, Any] = {"n": 3, "m": 101, "d": 24, "dv": 16, "heads": 2}
#: for the interpreter, which takes seconds where there are many programs
BIASED = (
    "none", "low_rank-unsplit-ranks", "key_bias-rows", "relative_table", "regions", "dense",
    "lookup", "axial-rows", "all", "heads-differ",
)  # fmt: skip


@contextlib.contextmanager
def parted(parts: int) -> Iterator[None]:
    """So many parts and small blocks; fails where a launch was left whole."""
    with launch.forced(SMALL), launch.split_into(parts):
        yield
        assert launch._PLANS
        expected = LaunchPlan if parts == 1 else PartedPlan
        assert all(type(known[0]) is expected for known in launch._PLANS.values() if known)


def call(x: Inputs, bias: ScoreBias | None, kernel: str, parts: int, **options: Any) -> Tensor:
    with parted(parts):
        return flashbias_attention(x.q, x.k, x.v, bias, backend=kernel, **options)


def check(x: Inputs, bias: ScoreBias | None, kernel: str, *parts: int, **options: Any) -> None:
    plain, truth = plain_of(x, bias, **options), truth_of(x, bias, **options)
    for count in parts:
        out = call(x, bias, kernel, count, **options)
        assert out.dtype == x.dtype
        assert_parity(out, plain, truth)


@pytest.mark.parametrize("name", BIASED)
def test_biases(name: str, half: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, half, **SIZES)
    check(x, BIASES[name](x), kernel, 3)


@pytest.mark.parametrize("name", ["low_rank", "alibi"])
def test_causal_cosine(name: str, dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, dtype, **SIZES)
    check(x, BIASES[name](x), kernel, 3, causal=True, cosine=True, scale=8.0)


@pytest.mark.parametrize("n", [1, 16])
def test_numbers_of_parts(n: int, dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    """Seven parts of four blocks: three are empty."""
    x = Inputs(device, dtype, **{**SIZES, "n": n}, batch=(1,))
    check(x, x.bias(x.low_rank(), x.alibi()), kernel, 1, 2, 3, 7, causal=True)


@pytest.mark.parametrize("m", [1, 31, 64, 65])
def test_few_keys(m: int, half: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, half, **{**SIZES, "n": 1, "m": m})
    check(x, x.bias(x.dense()), kernel, 3, causal=True)


def test_the_most_parts(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, **{**SIZES, "n": 16, "heads": 1}, batch=(1,))
    check(x, None, kernel, MOST_PARTS)
    for wrong in (0, MOST_PARTS + 1):
        with pytest.raises(ValueError, match="parts must be"), launch.split_into(wrong):
            pass


@pytest.mark.parametrize("start", [0, 30, 61, 90, 300, -2])
def test_starts(start: int, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Parts share out what is visible; where that is nothing, rows are zero."""
    x = Inputs(device, half, **SIZES)
    bias = x.bias(x.alibi(), x.diagonal())
    check(x, bias, kernel, 3, causal=True, query_start=start)


def test_starts_of_the_batch(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    x = Inputs(device, dtype, **SIZES)
    starts = torch.tensor([40, 98], device=device)
    with parted(3):
        out = flashbias_attention(
            x.q, x.k, x.v, x.bias(x.alibi()), causal=True, query_start=starts, backend=kernel
        )
    for i, start in enumerate(starts.tolist()):
        one = Inputs(device, dtype, **SIZES)
        one.q, one.k, one.v = x.q[i], x.k[i], x.v[i]
        bias = one.bias(one.alibi())
        options = {"causal": True, "query_start": start}
        assert_parity(out[i], plain_of(one, bias, **options), truth_of(one, bias, **options))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding(side: str, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Whole parts are hidden from one entry of the batch, and everything from another.

    What is visible is so far below zero that a level of zero for the others would hide it.
    """
    x = Inputs(device, half, **SIZES, batch=(3,))
    mask = torch.ones(3, x.m, dtype=torch.bool, device=device)
    mask[0, {"left": slice(0, 70), "right": slice(10, None), "middle": slice(30, 97)}[side]] = 0
    mask[1] = False
    bias = x.bias(x.low_rank(), steps(x, -200.0))
    check(x, bias, kernel, 4, key_mask=mask)
    out = call(x, bias, kernel, 3, key_mask=mask)
    assert not out[1].any()


@pytest.mark.parametrize("rise", [-1e4, -40.0, 9.0, 40.0, 1e4])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_scores_that_are_far_larger_in_one_block(
    at: int, rise: float, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Of six, in two parts: the last block of a part is its level, which others may overflow."""
    x = Inputs(device, half, **{**SIZES, "n": 1, "m": 192}, batch=(1,))
    heights = [0.0] * 6
    heights[at] = rise
    check(x, x.bias(steps(x, *heights)), kernel, 2)


def test_steep_alibi(half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Far keys are thousands below the near ones, and all of the weight is in one part."""
    x = Inputs(device, half, **{**SIZES, "n": 1})
    bias = x.bias(Alibi(slopes=torch.tensor([8.0, 0.125], device=device)))
    check(x, bias, kernel, 3, causal=True)
    check(x, bias, kernel, 3)


def test_bounded_scores(kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_is_bounded", lambda *_: True)
    x = Inputs(device, torch.float32, **SIZES)
    check(x, x.bias(x.low_rank(2)), kernel, 3, 7, cosine=True, scale=4.0)


def test_scales_of_heads(half: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, half, **{**SIZES, "heads": 3}, batch=(1,))
    scale = torch.tensor([0.0, -0.7, 2.0], device=device)
    check(x, x.bias(x.low_rank(), x.key_bias()), kernel, 3, scale=scale)


BATCHES: dict[str, Callable[[Inputs], ScoreBias]] = {
    "rows share": lambda x: x.bias(x.low_rank(3, batch=(2, 1)), x.dense(batch=(3,))),
    "own": lambda x: x.bias(x.low_rank(3, batch=(2, 3)), x.key_bias(batch=(2, 1))),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_dimensions(name: str, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float32, **{**SIZES, "n": 2, "m": 61}, batch=(2, 3))
    check(x, BATCHES[name](x), kernel, 2)


def test_more_batch_dimensions_than_the_kernel_walks(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float32, **{**SIZES, "n": 1, "m": 40, "heads": 1}, batch=(2, 2, 2, 2))
    own = {"batch": (2, 1, 2, 1)}
    check(x, x.bias(x.low_rank(2, **own), x.key_bias(batch=(1, 2, 1, 2))), kernel, 2)


def test_heads_share_keys_and_layouts_differ(
    half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Keys as a cache has them, (batch, tokens, heads, size), with room for more tokens."""
    x = Inputs(device, half, **{**SIZES, "heads": 4}, kv_heads=2)
    cache = [t.transpose(-2, -3).repeat(1, 2, 1, 1)[:, : x.m].transpose(-2, -3) for t in (x.k, x.v)]
    x.k, x.v = cache
    check(x, x.bias(x.low_rank(), x.alibi()), kernel, 3, causal=True)


def test_the_same_bits_each_time(half: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, half, **SIZES, batch=(1,))
    bias = PreparedBias(x.bias(x.low_rank(), x.key_bias()))
    first, *others = (call(x, bias, kernel, 5) for _ in range(3))  # type: ignore[arg-type]
    assert all(torch.equal(first, other) for other in others)


def test_infinities_and_nan_spread_as_without_parts(kernel: str, device: torch.device) -> None:
    """A key that is not a number must not be lost with the part that it is in."""
    for place, value in ((5, float("nan")), (98, float("nan")), (60, float("inf"))):
        x = Inputs(device, torch.float32, **{**SIZES, "n": 1}, batch=(1,))
        x.k[:, 1, place] = value
        one, three = (call(x, None, kernel, parts).isnan() for parts in (1, 3))
        assert torch.equal(one, three) and bool(three[:, 1].all()) and not bool(three[:, 0].any())


def test_calls_that_are_left_whole(kernel: str, device: torch.device) -> None:
    """The rule holds on a CPU, too: long calls of few queries are shared out, but for these."""
    x = Inputs(device, torch.float16, batch=(1,), heads=1, n=1, m=1100, d=64)
    seen = []
    for options in ({}, {"gate": torch.zeros_like(x.q)}):
        with launch.forced(LaunchSettings(16, 128, 4, 2)):
            flashbias_attention(x.q, x.k, x.v, backend=kernel, **options)
            seen += [type(known[0]) for known in launch._PLANS.values() if known]
    assert seen == [PartedPlan, LaunchPlan]
    x = Inputs(device, torch.float32, batch=(1,), heads=1, n=1, m=20, d=16)
    with launch.split_into(3):
        gradients(x, x.bias(x.low_rank()), of_backend(kernel))
        assert [type(known[0]) for known in launch._PLANS.values() if known] == [LaunchPlan]


def test_observers_see_a_launch_once(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float32, **SIZES)
    seen: list[Any] = []
    with launch.observed(lambda *given: seen.append(given)):
        call(x, BIASES["heads-differ"](x), kernel, 3)
    assert len(seen) == 2 and all("parts" not in tensors for _, tensors, _ in seen)

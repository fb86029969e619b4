"""The walk that adds with atomics: as close to float64 as the others, and only when it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashbias_convert import Alibi, Dense, LowRank, ScoreBias
from flashbias_convert.attention import backward_launch, flashbias_attention
from tests.support import assert_parity

from .cases import BIASES, Inputs
from .gradients import Attention, gradients, of_backend, plain_gradients

WALK, FINISH = "all_gradients_kernel", "finish_queries_kernel"
TWO_WALKS = ["delta_kernel", "query_gradients_kernel", "key_gradients_kernel"]
ONE_WALK = ["delta_kernel", WALK, FINISH]


def with_atomics(kernel: str) -> Attention:
    """Our operator, allowed to use them."""
    return lambda q, k, v, bias, options: flashbias_attention(
        q, k, v, bias, backend=kernel, deterministic=False, **options
    )


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are launched, in order."""
    from flashbias_convert.attention import (
        triton_atomic,
        triton_backward,
        triton_keys,
        triton_pairs,
    )

    names: list[str] = []

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                self.kernel[grid](*args, **options)  # what it compiles is kept from the caller

            names.append(self.name)
            return launch

    with monkeypatch.context() as patch:
        for module in (triton_atomic, triton_backward, triton_keys, triton_pairs):
            for name in [n for n in vars(module) if n.endswith("_kernel")]:
                patch.setattr(module, name, Noted(name, getattr(module, name)))
        yield names


def check(
    x: Inputs,
    bias: ScoreBias | None,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    groups: int = 1,
    **options: Any,
) -> None:
    """All gradients by the walk with atomics, against plain attention in the same dtype."""
    truth = gradients(x, bias, of_backend("eager"), torch.float64, **options)
    with launches(monkeypatch) as names:
        found = gradients(x, bias, with_atomics(kernel), **options)
    assert names.count(WALK) == names.count(FINISH) == groups
    assert not {"query_gradients_kernel", "key_gradients_kernel"} & set(names)
    plain = plain_gradients(x, bias, truth, **options)
    assert set(found) == set(truth)
    for name in truth:
        assert_parity(found[name], plain[name], truth[name])


#: biases without gradients that are sums over the keys of each query, other than of factors
SERVED = ("none", "low_rank", "low_rank-unsplit-ranks", "low_rank-rows", "two-low_ranks",
          "key_bias", "alibi", "relative_table", "dense")  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_every_bias_that_is_served(
    name: str, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that fill no block, two blocks of keys, hidden keys."""
    x = Inputs(device, heads=1, n=17, m=47, d=24, dv=16)
    mask = x.integers(3, 2, x.m) > 0
    check(x, BIASES[name](x), kernel, monkeypatch, key_mask=mask)


@pytest.mark.parametrize("name", ["none", "low_rank", "key_bias", "alibi"])
def test_half_precision(
    name: str, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Inputs(device, torch.float16, batch=(1,), n=33, m=70, d=24, dv=16)
    mask = x.integers(3, 1, x.m) > 0
    check(x, BIASES[name](x), kernel, monkeypatch, key_mask=mask)


@pytest.mark.parametrize("name", ["low_rank", "alibi"])
def test_causal_cosine_with_a_scale_that_is_learnt(
    name: str, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of rows are in the way between sums and gradients, as in SwinV2."""
    x = Inputs(device, torch.float16, batch=(1,), n=47, m=70, d=8, dv=30)
    scale = torch.tensor([3.0, -8.0], device=device)
    check(x, BIASES[name](x), kernel, monkeypatch, causal=True, cosine=True, scale=scale)


@pytest.mark.parametrize("n", [1, 63, 65])
def test_lengths(
    n: int, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Inputs(device, torch.float16, batch=(1,), heads=1, n=n, m=70)
    check(x, x.bias(x.low_rank(2), x.key_bias()), kernel, monkeypatch, causal=True)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(
    kv_heads: int, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of two kinds besides: each group adds to sums of its own."""
    x = Inputs(device, torch.float16, batch=(1,), heads=4, kv_heads=kv_heads, n=37)
    terms = (x.low_rank(3), Dense(bias=x.normal(1, 37, 37), heads=(3,)))
    check(x, x.bias(*terms), kernel, monkeypatch, groups=2, causal=True)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("lead", [(), (2, 1)])
def test_what_the_batch_shares(
    lead: tuple[int, ...],
    programs: int,
    kernel: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the loop over the batch is cut; sums of queries ignore it."""
    monkeypatch.setattr(backward_launch, "ENOUGH_PROGRAMS", programs)
    x = Inputs(device, batch=(2, 2), heads=2, n=9, m=11)
    one_head = LowRank(phi_q=x.normal(*lead, 1, 9, 2), phi_k=x.normal(*lead, 2, 11, 2))
    bias = x.bias(x.low_rank(3, batch=lead), one_head, x.key_bias(batch=lead))
    check(x, bias, kernel, monkeypatch)


def test_more_batch_dimensions_than_the_kernels_walk(
    kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Inputs(device, batch=(2, 1, 2, 2, 2), n=5, heads=1)
    bias = x.bias(x.key_bias(batch=(2, 1, 2, 1, 2)), x.low_rank(2, batch=(1, 1, 2, 1, 1)))
    check(x, bias, kernel, monkeypatch, groups=2)


def test_slopes_of_rows_that_stand_elsewhere(
    kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slope is one number for all rows and keys of a head; starts differ over the batch."""
    x = Inputs(device, batch=(3,), n=5, m=11)
    bias = x.bias(Alibi(slopes=torch.tensor([0.3, 0.1], device=device), symmetric=True))
    options = {"causal": True, "query_start": torch.tensor([0, 5, -2], device=device)}
    truth = gradients(x, bias, of_backend("eager"), torch.float64, **options)
    with launches(monkeypatch) as names:
        found = gradients(x, bias, with_atomics(kernel), **options)
    assert names == ONE_WALK
    for name in truth:
        # fp32 sums of a few dozen products
        allowed = 64 * torch.finfo(torch.float32).eps * (1 + float(truth[name].abs().max()))
        assert (found[name] - truth[name]).abs().max() < allowed


# -- when it runs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["key_bias-rows", "alibi-symmetric-rows", "diagonal", "axial"])
def test_what_is_not_served_has_the_same_bits(
    name: str, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over the keys of each query are left to the kernel of queries, without a word."""
    x = Inputs(device, heads=1, n=17, m=21)
    bias = BIASES[name](x)
    expected = gradients(x, bias, of_backend(kernel))
    with launches(monkeypatch) as names:
        found = gradients(x, bias, with_atomics(kernel))
    assert names[:3] == TWO_WALKS and WALK not in names
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_deterministic_unless_told_otherwise(
    kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Inputs(device, n=11)
    with launches(monkeypatch) as names:
        gradients(x, x.bias(x.low_rank(2)), of_backend(kernel))
    assert names == TWO_WALKS


@pytest.mark.parametrize("warn_only", [False, True])
def test_torch_has_the_last_word(
    warn_only: bool, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what torch says while the backward pass runs."""
    x = Inputs(device, n=11)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out = flashbias_attention(*leaves, backend=kernel, deterministic=False)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        with launches(monkeypatch) as names:
            out.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert names == TWO_WALKS


@pytest.mark.parametrize(
    "asks, expected", [("q", TWO_WALKS[:2]), ("kv", [TWO_WALKS[0], TWO_WALKS[2]]), ("qk", ONE_WALK)]
)
def test_one_walk_where_it_saves_another(
    asks: str,
    expected: list[str],
    kernel: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = Inputs(device, n=11)
    leaves = {name: getattr(x, name).requires_grad_(name in asks) for name in "qkv"}
    out = flashbias_attention(*leaves.values(), backend=kernel, deterministic=False)
    with launches(monkeypatch) as names:
        found = torch.autograd.grad(out.square().sum(), [leaves[name] for name in asks])
    assert names == expected
    assert all(g.abs().max() > 0 for g in found)

"""Calls of few queries: the kernels of compiled graphs compute what the operator computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import ScoreBias
from flashbias_convert.attention import (
    PreparedBias,
    flashbias_attention,
    launch,
    traced_launch,
)
from flashbias_convert.attention.group_calls import empty_output, group_calls
from flashbias_convert.attention.parts import MOST_QUERIES
from tests.support import assert_parity

from .cases import BIASES, Inputs, plain_of, truth_of
from .conftest import HAS_GPU, INTERPRETED
from .traced import HOPPER_BYTES, SIZES, arguments_of

pytest.importorskip("triton")

from flashbias_convert.attention import (
    triton_combine,
    triton_forward,
    triton_traced,
)

#: graphs hold none of the interpreter
INTERPRETED_KERNELS = {
    triton_forward.attention_kernel: triton_traced.traced_attention_kernel,
    triton_combine.combine_parts_kernel: triton_traced.traced_combine_kernel,
}
BIASED = (
    "none", "low_rank-unsplit-ranks", "key_bias-rows", "alibi", "relative_table", "regions",
    "dense", "lookup", "axial-rows", "diagonal", "all", "heads-differ",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


# -- the kernels of graphs compute what the operator computes --------------------------------------


def launched(x: Inputs, bias: ScoreBias | None, **options: Any) -> Tensor:
    """The kernels of graphs, launched here and now."""
    arguments = arguments_of(x, bias, **options)
    out = empty_output(x.q, x.v)
    planned = traced_launch._planned(group_calls(out, *arguments))
    assert planned is not None
    for each in planned:
        traced_launch._launch(each)
    return out


@pytest.fixture
def _run_at_once(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    if INTERPRETED:
        monkeypatch.setattr(traced_launch, "_memory_on_chip", lambda _: HOPPER_BYTES)
        # that of torch takes no kernels of the interpreter
        monkeypatch.setattr(torch.library, "wrap_triton", lambda each: each)
        monkeypatch.setattr(traced_launch, "_in_graphs", lambda: INTERPRETED_KERNELS)


@pytest.mark.usefixtures("_run_at_once")
@pytest.mark.parametrize("name", BIASED)
def test_biases(name: str, half: torch.dtype, device: torch.device) -> None:
    x = Inputs(device, half, **SIZES)
    bias = BIASES[name](x)
    assert_parity(launched(x, bias), plain_of(x, bias), truth_of(x, bias))


@pytest.mark.usefixtures("_run_at_once")
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_masks_and_starts(parts: int, dtype: torch.dtype, device: torch.device) -> None:
    """With a gate, which is never shared out, and without."""
    x = Inputs(device, dtype, **{**SIZES, "n": 2}, kv_heads=1, batch=(1,))
    bias = x.bias(x.alibi())
    starts = torch.tensor([60], device=device)
    mask = torch.arange(x.m, device=device)[None] >= 5
    told = {"causal": True, "key_mask": mask, "scale": 0.3}
    with launch.split_into(parts):
        out = launched(x, bias, **told, starts=starts)
    plain, truth = (f(x, bias, **told, query_start=60) for f in (plain_of, truth_of))
    assert_parity(out, plain, truth)
    gated = {**told, "gate": x.normal(1, x.heads, x.n, 16).to(dtype)}
    plain, truth = (f(x, bias, **gated, query_start=60) for f in (plain_of, truth_of))
    assert_parity(launched(x, bias, **gated, starts=starts), plain, truth)


# -- on a card, compiled ---------------------------------------------------------------------------

needs_card = pytest.mark.skipif(not HAS_GPU, reason="needs a card")


class Decoding(nn.Module):
    """A step with a cache of fixed size, which it writes to."""

    def __init__(self, x: Inputs, bias: ScoreBias | None) -> None:
        super().__init__()
        self.bias = None if bias is None else PreparedBias(bias)
        self.register_buffer("k", x.k.clone())
        self.register_buffer("v", x.v.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        self.k.index_copy_(-2, slots, k)
        self.v.index_copy_(-2, slots, v)
        start = slots[0].expand(q.shape[:-3])
        options: dict[str, Any] = {"causal": True, "query_start": start, "backend": "triton"}
        out = flashbias_attention(q, self.k, self.v, self.bias, **options)
        return out.transpose(-3, -2).flatten(-2)


def step_of(x: Inputs, first: int) -> tuple[Tensor, ...]:
    n, slots = x.n, torch.arange(first, first + x.n, device=x.device)
    return (
        x.q,
        x.normal(*x.k[..., :n, :].shape).to(x.q),
        x.normal(*x.v[..., :n, :].shape).to(x.q),
        slots,
    )


@needs_card
@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize(("n", "m"), [(1, 4096), (3, 101), (MOST_QUERIES, 300)])
def test_compiled(name: str, n: int, m: int, device: torch.device) -> None:
    from torch._inductor.utils import run_and_get_code

    x = Inputs(device, torch.bfloat16, **{**SIZES, "n": n, "m": m, "d": 64, "dv": 64})
    bias = BIASES[name](x)
    eager, compiled = Decoding(x, bias), Decoding(x, bias)
    call = torch.compile(compiled, fullgraph=True)
    given = step_of(x, m - n)
    with torch.no_grad():
        out, (code,) = run_and_get_code(call, *given)
        again, expected = call(*given), eager(*given)
    assert "traced_attention_kernel" in code and "flashbias_convert.attention" not in code
    assert f"empty_strided_cuda((2, 2, {m}, 64)" not in code  # no copy of what is kept
    assert torch.equal(out, again) and torch.equal(compiled.k, eager.k)
    seen = Inputs(device, torch.bfloat16, **{**SIZES, "n": n, "m": m, "d": 64, "dv": 64})
    seen.k, seen.v = eager.k, eager.v
    merged = [
        f(seen, bias, causal=True).transpose(-3, -2).flatten(-2) for f in (plain_of, truth_of)
    ]
    assert_parity(out, *merged)
    assert_parity(expected, *merged)


@needs_card
@pytest.mark.parametrize(
    "kind", ["mask", "computed mask", "gate", "fp32", "scales", "both directions", "17 queries"]
)
def test_compiled_calls(kind: str, device: torch.device) -> None:
    from torch._inductor.utils import run_and_get_code

    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x = Inputs(device, dtype, n=17 if kind == "17 queries" else 2, m=2048, d=64)
    bias = x.bias(x.alibi())
    prepared, length = PreparedBias(bias), torch.tensor([[2048], [77]], device=device)
    places = torch.arange(2048, device=device)
    options: dict[str, Any] = {
        "mask": {"key_mask": places < length},
        "gate": {"gate": x.normal(2, 2, 2, 64).to(dtype)},
        "scales": {"scale": torch.tensor([0.1, 0.3], device=device)},
    }.get(kind, {})
    options = {"causal": kind != "both directions", **options}
    computed = {"key_mask": places < length} if kind == "computed mask" else {}

    def call(q: Tensor, k: Tensor, v: Tensor, length: Tensor, **options: Any) -> Tensor:
        if kind == "computed mask":
            options["key_mask"] = torch.arange(2048, device=q.device) < length
        return flashbias_attention(q * 1, k, v, prepared, backend="triton", **options)

    compiled = torch.compile(call, fullgraph=True)
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, x.q, x.k, x.v, length, **options)
    assert ("traced_attention_kernel" in code) == (kind != "17 queries")
    told = {**options, **computed}
    assert_parity(out, plain_of(x, bias, **told), truth_of(x, bias, **told))


@needs_card
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "reduce-overhead"])
def test_ways_of_running(backend: str, device: torch.device) -> None:
    x = Inputs(device, torch.bfloat16, n=1, m=2048, d=64)
    bias = x.bias(x.alibi())
    eager, compiled = Decoding(x, bias), Decoding(x, bias)
    how = {"mode": backend} if backend == "reduce-overhead" else {"backend": backend}
    call = torch.compile(compiled, fullgraph=True, **how)
    with torch.no_grad():
        for first in (2000, 2001, 2002, 2003):
            given = step_of(x, first)
            out, expected = call(*given).clone(), eager(*given)
            assert torch.allclose(out, expected, atol=2e-2, rtol=2e-2)


@needs_card
def test_rows_that_are_not_aligned(device: torch.device) -> None:
    """Keys that begin in the midst of sixteen bytes: nothing may be read as vectors."""
    x = Inputs(device, torch.bfloat16, n=1, m=2048, d=64)
    bias = PreparedBias(x.bias(x.alibi()))

    def call(q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv[..., 1:65], kv[..., 65:129]
        return flashbias_attention(q, k, v, bias, causal=True, backend="triton")

    kv = x.normal(2, 2, 2048, 130).to(x.q)
    with torch.no_grad():
        out = torch.compile(call, fullgraph=True)(x.q, kv)
        moved = torch.empty(kv.numel() + 1, dtype=kv.dtype, device=device)[1:].view_as(kv)
        moved.copy_(kv)
        again = torch.compile(call, fullgraph=True)(x.q, moved)
        expected = call(x.q, kv)
    assert torch.allclose(out, expected, atol=2e-2) and torch.allclose(again, expected, atol=2e-2)

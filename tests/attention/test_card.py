"""What only a real card can show: large offsets, CUDA graphs, repeats, other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch

from flashbias_convert import Dense, LowRank, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.packing import GroupSpec
from flashbias_convert.attention.tuning import LaunchSettings
from tests.support import assert_parity

from .cases import BIASES, Inputs, plain_of, truth_of
from .conftest import HAS_GPU
from .gradients import gradients, of_backend, plain_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA card")]
CUDA = torch.device("cuda")


def test_offsets_beyond_32_bits() -> None:
    """Batch entries 2**30 elements apart: entry 2 starts at 2**31."""
    shape, step = (3, 2, 64, 32), 2**30
    storage = torch.empty(2 * step + 2 * 64 * 32, dtype=torch.float16, device=CUDA)
    q = storage.as_strided(shape, (step, 64 * 32, 32, 1))
    q.copy_(torch.randn(shape, device=CUDA))
    k, v = (torch.randn(shape, device=CUDA).half() for _ in range(2))
    out = flashbias_attention(q, k, v, backend="triton")
    for i in range(3):
        one = flashbias_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], backend="triton")
        assert torch.equal(out[i], one[0])


def test_more_than_65535_batches_and_heads() -> None:
    q, k, v = (torch.randn(40_000, 2, 16, 16, device=CUDA).half() for _ in range(3))
    out = flashbias_attention(q, k, v, backend="triton")
    last = flashbias_attention(q[-1:], k[-1:], v[-1:], backend="triton")
    assert torch.equal(out[-1:], last)


def test_a_dense_bias_of_four_gigabytes() -> None:
    heads, n = 32, 8192
    x = Inputs(CUDA, torch.bfloat16, batch=(1,), heads=heads, n=n, d=32)
    values = torch.randn(heads, n, n, dtype=torch.bfloat16, device=CUDA)
    out = flashbias_attention(
        x.q, x.k, x.v, ScoreBias((Dense(bias=values),), heads), backend="triton"
    )
    rows = slice(n - 64, n)
    scores = (x.q[0, -1, rows].double() @ x.k[0, -1].double().T) * 32**-0.5
    truth = (scores + values[-1, rows].double()).softmax(-1) @ x.v[0, -1].double()
    assert (out[0, -1, rows] - truth).abs().max() < 5e-3


def assert_replays_follow(call: Callable[[], torch.Tensor], x: Inputs) -> None:
    """A CUDA graph of a call that has run before computes the bits of calls, with new inputs."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        x.q.copy_(torch.randn_like(x.q))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.parametrize("name", ["low_rank", "all", "heads-differ"])
def test_cuda_graph_replays_equal_eager(name: str) -> None:
    x = Inputs(CUDA, torch.float16, n=100, heads=3)
    bias = PreparedBias(BIASES[name](x))  # type: ignore[arg-type]

    def call() -> torch.Tensor:
        return flashbias_attention(x.q, x.k, x.v, bias, backend="triton")

    call()
    assert_replays_follow(call, x)


def test_a_shape_not_seen_before_can_be_captured() -> None:
    """Nothing is tuned or timed at the first call, so nothing breaks a capture."""
    x = Inputs(CUDA, torch.float16, n=77, d=40, heads=3)
    bias = PreparedBias(x.bias(x.low_rank(9)))
    bias.packed(True, 40**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    graph.replay()
    assert torch.equal(out, flashbias_attention(x.q, x.k, x.v, bias, backend="triton"))


@pytest.mark.parametrize("name", ["low_rank", "relative_table", "regions", "all"])
def test_a_hundred_calls_give_the_same_bits(name: str) -> None:
    """The first call included: nothing may depend on trial runs or on a race."""
    x = Inputs(CUDA, torch.bfloat16, batch=(8,), n=577, d=32, heads=4)
    bias = PreparedBias(BIASES[name](x))  # type: ignore[arg-type]
    first = flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    for _ in range(99):
        assert torch.equal(first, flashbias_attention(x.q, x.k, x.v, bias, backend="triton"))


#: heads, kv_heads, head size, batch
DECODING = {"50 x 32": (50, 50, 32, 1), "32 x 128": (32, 8, 128, 1), "8 x 64, batch": (8, 8, 64, 3)}


@pytest.mark.parametrize("m", [8192, 8001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "low_rank", "alibi", "key_bias"])
@pytest.mark.parametrize("sizes", DECODING)
def test_long_decoding_is_shared_out_by_itself(
    sizes: str, name: str, dtype: torch.dtype, m: int
) -> None:
    """Few queries and many keys: several programs each, on cards of 50 multiprocessors or more."""
    heads, kv_heads, d, batch = DECODING[sizes]
    x = Inputs(
        CUDA, dtype, batch=(batch,), heads=heads, kv_heads=kv_heads, n=1 if m % 2 else 2, m=m, d=d
    )
    bias, options = BIASES[name](x), {"causal": name == "alibi"}
    seen: list[int] = []

    def note(spec: GroupSpec, tensors: Mapping[str, torch.Tensor], _: object) -> None:
        seen.append(launch.parts_for(spec, tensors, heads * batch))

    with launch.observed(note):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton", **options)
    assert seen and min(seen) > 1
    assert_parity(out, plain_of(x, bias, **options), truth_of(x, bias, **options))


def test_decoding_in_parts_repeats_and_replays() -> None:
    """A hundred calls, a CUDA graph, and new inputs in its replays: the same bits."""
    x = Inputs(CUDA, torch.bfloat16, batch=(1,), heads=50, n=1, m=8192, d=32)
    bias = PreparedBias(x.bias(x.alibi()))

    def call() -> torch.Tensor:
        return flashbias_attention(x.q, x.k, x.v, bias, causal=True, backend="triton")

    first = call()
    assert all(torch.equal(first, call()) for _ in range(100))
    assert_replays_follow(call, x)


def test_parts_beyond_32_bits() -> None:
    """Keys 2**27 elements apart in a layout (M, B, H, D): the last is beyond 2**31."""
    m, step = 40, 2**27
    storage = torch.empty((m - 1) * step + 16, dtype=torch.float16, device=CUDA)
    k = storage.as_strided((1, 1, m, 16), (16, 16, step, 1))
    x = Inputs(CUDA, torch.float16, batch=(1,), heads=1, n=1, m=m, d=16)
    k.copy_(x.k)
    with launch.forced(LaunchSettings(16, 16, 4, 2)), launch.split_into(3):
        out = flashbias_attention(x.q, k, x.v, backend="triton")
    assert_parity(out, plain_of(x, None), truth_of(x, None))


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_launch_settings_change_rounding_only(warps: int, block: int) -> None:
    x = Inputs(CUDA, torch.float16, n=130, heads=2)
    bias = x.bias(x.low_rank(), x.table())
    settings = LaunchSettings(block, 32, warps, 2)
    with launch.forced(settings):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    assert_parity(out, plain_of(x, bias), truth_of(x, bias))


@pytest.mark.parametrize("seed", range(20))
def test_triangle_attention_in_bf16(seed: int) -> None:
    """A pair bias shared by all rows (no row axis) and a mask without head axis."""
    x = Inputs(CUDA, torch.bfloat16, batch=(1, 64), heads=4, n=64, d=32, seed=seed)
    mask = x.integers(5, 1, 64, 64) > 0
    bias = x.bias(Dense(bias=x.normal(1, 1, 4, 64, 64)))
    out = flashbias_attention(x.q, x.k, x.v, bias, key_mask=mask, backend="triton")
    assert_parity(out, plain_of(x, bias, key_mask=mask), truth_of(x, bias, key_mask=mask))


def test_memory_does_not_grow_with_shared_rows() -> None:
    x = Inputs(CUDA, torch.bfloat16, batch=(64,), heads=4, n=512, d=32)
    bias = PreparedBias(x.bias(x.dense()))
    flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert extra < 2**20


def test_a_call_does_not_wait_for_the_card() -> None:
    x = Inputs(CUDA, torch.float16, n=64, heads=3)
    bias = x.bias(x.low_rank(), x.table(), x.regions())
    mask = torch.ones(2, 64, dtype=torch.bool, device=CUDA)
    for each in (bias, PreparedBias(bias)):
        flashbias_attention(x.q, x.k, x.v, each, key_mask=mask, backend="triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            flashbias_attention(x.q, x.k, x.v, each, key_mask=mask, backend="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_another_device_than_the_current_one() -> None:
    x = Inputs(CUDA, torch.float16)
    bias = x.bias(x.low_rank())
    other = torch.device("cuda:1")
    out = flashbias_attention(
        x.q.to(other), x.k.to(other), x.v.to(other), bias.to(other), backend="triton"
    )
    expected = flashbias_attention(x.q, x.k, x.v, bias, backend="triton")
    assert torch.equal(out.cpu(), expected.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_dtypes_give_finite_numbers(dtype: torch.dtype) -> None:
    """An fp32 mask read as half-precision bits gives NaN."""
    x = Inputs(CUDA, dtype, n=32)
    hidden = torch.ones(32, 32, dtype=torch.bool, device=CUDA).triu(1)
    causal = torch.zeros(1, 32, 32, device=CUDA).masked_fill(hidden, float("-inf"))
    bias = x.bias(Dense(bias=causal))
    for backend in ("triton", "sdpa"):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
        expected = flashbias_attention(x.q, x.k, x.v, causal=True, backend=backend)
        assert torch.allclose(out, expected, atol=4 * torch.finfo(dtype).eps)


def test_float_factors_next_to_bf16_scores() -> None:
    """Positions 2047 to 2049 as factors: TF32 and bf16 would round them."""
    x = Inputs(CUDA, torch.bfloat16, batch=(1,), heads=1, n=3, m=3, d=32)
    at = torch.tensor([2047.0, 2048.0, 2049.0], device=CUDA)
    term = LowRank(phi_q=torch.ones(1, 3, 1, device=CUDA), phi_k=at[None, :, None])
    bias = x.bias(term)
    x.v = torch.eye(3, device=CUDA, dtype=torch.bfloat16)[None, None]
    out = flashbias_attention(x.q, x.k, x.v, bias, scale=0.0, backend="triton")
    expected = (at - 2048).softmax(0)
    assert (out[0, 0, 0] - expected).abs().max() < 2**-8
    wide = dataclasses.replace(term, phi_q=term.phi_q.double(), phi_k=term.phi_k.double())
    assert torch.equal(
        out, flashbias_attention(x.q, x.k, x.v, x.bias(wide), scale=0.0, backend="triton")
    )


@pytest.mark.parametrize("n", [113, 197])
@pytest.mark.parametrize("rank", [7, 56, 128])
@pytest.mark.parametrize("d", [72, 96, 128])
def test_gradients_at_wide_heads_and_ranks(d: int, rank: int, n: int) -> None:
    """Odd lengths, sizes between powers of two; two draws are judged together."""
    parts = []
    for seed in (0, 1):
        x = Inputs(CUDA, torch.bfloat16, n=n, d=d, seed=seed)
        phi = [x.normal(x.heads, n, rank) / rank**0.25 for _ in range(2)]
        bias = x.bias(LowRank(phi_q=phi[0], phi_k=phi[1], split=0))
        truth = gradients(x, bias, of_backend("eager"), torch.float64)
        found, plain = gradients(x, bias, of_backend("triton")), plain_gradients(x, bias, truth)
        parts.append({name: (found[name], plain[name], truth[name]) for name in truth})
    assert {"q", "k", "v"} < set(parts[0])
    for name in parts[0]:
        assert_parity(*(torch.stack(e) for e in zip(*(p[name] for p in parts), strict=True)))


@pytest.mark.parametrize("name", ["low_rank", "relative_table", "dense", "all"])
def test_a_hundred_backward_passes_give_the_same_bits(name: str) -> None:
    """Of q, k, v and every tensor of the bias: nothing is added up in the order of a race."""
    x = Inputs(CUDA, torch.bfloat16, batch=(8,), n=577, d=32, heads=4)
    bias = BIASES[name](x)
    first = gradients(x, bias, of_backend("triton"))
    assert len(first) > 3 and all(bool(g.any()) for g in first.values())
    for _ in range(99):
        again = gradients(x, bias, of_backend("triton"))
        assert all(torch.equal(first[key], again[key]) for key in first)

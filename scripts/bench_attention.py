"""Time our operator beside its peers, in one run on one card.

python scripts/bench_attention.py [--kernel FILE.py] [--output FILE.csv]

Peers: torch SDPA without a bias (flash, cuDNN), torch SDPA with the dense bias (memory-efficient,
cuDNN), our sdpa path, and a kernel from a file that defines `attn(q, k, v, pq, pk)` with factors
in base 2. Every result is compared with float64 on a slice of the batch. `median_ms` is time on
the card (CUDA graph replays), `call_ms` the time of eager calls, Python included.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from attention_shapes import SHAPES, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbias_convert import LowRank, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
Call = Callable[[], Tensor]


def peers(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, kernel: ModuleType | None
) -> Iterator[tuple[str, Call]]:
    """Names and calls; q, k and v are (*batch, H, N, D)."""
    prepared = None if bias is None else PreparedBias(bias)
    yield "ours", lambda: flashbias_attention(q, k, v, prepared, backend="triton", **shape.options)
    yield "ours sdpa", lambda: flashbias_attention(q, k, v, bias, backend="sdpa", **shape.options)
    flat_q, flat_k, flat_v = (x.flatten(0, -4) for x in (q, k, v))
    causal = bool(shape.options.get("causal"))
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        yield f"{name} without bias", _sdpa(flat_q, flat_k, flat_v, None, causal, backend)
    if bias is not None and len(shape.batch) == 1 and shape.n <= 8192:
        mask = bias.dense(shape.n, shape.n, dtype=torch.float32)
        if causal:
            hidden = torch.ones(shape.n, shape.n, dtype=torch.bool, device=q.device).triu(1)
            mask = mask.masked_fill(hidden, float("-inf"))
        mask = mask.to(q.dtype)[None]
        for name, backend in (
            ("efficient", SDPBackend.EFFICIENT_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            yield f"{name} + dense bias", _sdpa(flat_q, flat_k, flat_v, mask, False, backend)
    if kernel is not None and not shape.options and len(shape.batch) == 1:
        yield kernel.__name__, _foreign(kernel, q, k, v, bias)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, backend: SDPBackend
) -> Call:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    return call


def _foreign(kernel: ModuleType, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None) -> Call:
    """A kernel given by the user: fp16 factors, phi_q already times log2(e)."""
    if bias is None:
        return lambda: kernel.attn(q, k, v)
    (term,) = bias.terms
    assert isinstance(term, LowRank)
    pq = (term.phi_q * math.log2(math.e)).half()[None]
    pk = term.phi_k.half()[None]
    return lambda: kernel.attn(q, k, v, pq, pk)


def error(call: Call, shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None,
          has_bias: bool) -> float:  # fmt: skip
    """Relative error of the first batch entry and head against float64, 256 queries of it."""
    out = call().reshape(*q.shape[:-1], v.shape[-1])
    at = (0,) * (q.dim() - 3)
    own = None if bias is None or not has_bias else bias.select_heads([0])
    rows = slice(0, 256)
    full = [x[at][:1].double() for x in (q, k, v)]
    options = dict(shape.options)
    truth = flashbias_attention(*full, _first_window(own), backend="eager", **options) \
        if shape.n <= 8192 else None  # fmt: skip
    if truth is None:
        return float("nan")
    part = out[at][:1, rows].double()
    return float((part - truth[:, rows]).norm() / truth[:, rows].norm())


def _first_window(bias: ScoreBias | None) -> ScoreBias | None:
    """The bias of batch entry 0, for terms that have batch dimensions."""
    if bias is None:
        return None
    return ScoreBias(
        tuple(t.map_tensors(lambda name, x: x[0] if name == "ids" and x.dim() > 1 else x)
              for t in bias.terms), bias.num_heads)  # fmt: skip


def main() -> None:
    """Time every peer on every shape; print and write a table."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", type=Path, help="a Python file with attn(q, k, v, pq, pk)")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_attention.csv")
    options = parser.parse_args()
    kernel = None if options.kernel is None else _load(options.kernel)
    machine = [torch.cuda.get_device_name(), torch.__version__, triton.__version__]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        times = ["median_ms", "p20_ms", "p80_ms", "call_ms"]
        writer.writerow(["shape", "peer", *times, "peak_mib", "error", "card", "torch", "triton"])
        for name in options.shapes:
            shape = SHAPES[name]
            torch.manual_seed(0)
            q, k, v = shape.inputs(torch.bfloat16, DEVICE)
            bias = None if shape.bias is None else shape.bias(shape, DEVICE)
            for peer, call in peers(shape, q, k, v, bias, kernel):
                try:
                    wrong = error(call, shape, q, k, v, bias, "without" not in peer)
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    call()
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                    eager = triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")
                    with torch.cuda.stream(torch.cuda.Stream()):
                        low, middle, high = triton.testing.do_bench_cudagraph(
                            call, rep=60, quantiles=[0.2, 0.5, 0.8]
                        )
                except (RuntimeError, ValueError) as problem:
                    print(f"{name:30s} {peer:22s} {str(problem).splitlines()[0][:70]}")
                    continue
                times = [f"{ms:.4f}" for ms in (middle, low, high, eager)]
                writer.writerow([name, peer, *times, f"{peak:.1f}", f"{wrong:.2e}", *machine])
                print(
                    f"{name:30s} {peer:22s} {middle:8.4f} ms (call {eager:8.4f} ms) "
                    f"{peak:9.1f} MiB  error {wrong:.1e}",
                    flush=True,
                )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

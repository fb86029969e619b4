"""Time forward plus backward of our operator beside its peers, in one run on one card.

python scripts/bench_backward.py [--shapes NAME ...] [--output FILE.csv]

Every tensor of a bias asks for a gradient, as in training. Peers: torch SDPA without a bias
(flash, cuDNN), torch SDPA with the dense bias made from the terms in each step (memory-efficient),
compiled FlexAttention that reads the dense bias, and our sdpa path. `median_ms` is the time of
eager steps, `peak_mib` the memory beyond the inputs, `error` the largest relative error of the
gradients of q, k and v against float64 for the first batch entry and head.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from attention_shapes import SHAPES, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from flashbias_convert import ScoreBias
from flashbias_convert.attention import flashbias_attention

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
#: Longest sequence whose dense bias, and whose float64 reference, are made.
LONGEST = 8192

#: q, k, v -> output; the bias is in the closure
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def learnt(bias: ScoreBias | None) -> tuple[ScoreBias | None, list[Tensor]]:
    """The bias with tensors that ask for gradients, and these tensors."""
    leaves: list[Tensor] = []

    def leaf(_: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    if bias is None:
        return None, leaves
    terms = tuple(term.map_tensors(leaf) for term in bias.terms)
    return ScoreBias(terms, bias.num_heads), leaves


def peers(shape: Shape, bias: ScoreBias | None) -> Iterator[tuple[str, Attention, bool]]:
    """Names, calls, and whether they add the bias."""
    for name, backend in (("ours", "triton"), ("ours sdpa", "sdpa")):
        yield name, _ours(backend, bias, shape), True
    causal = bool(shape.options.get("causal"))
    for name, kernel in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        yield f"{name} without bias", _sdpa(kernel, None, causal), False
    if bias is None or len(shape.batch) > 1 or shape.n > LONGEST or shape.options.get("cosine"):
        return
    yield "efficient + dense bias", _sdpa(SDPBackend.EFFICIENT_ATTENTION, bias, causal), True
    yield "flex + dense bias", _flex(bias, causal), True


def _ours(backend: str, bias: ScoreBias | None, shape: Shape) -> Attention:
    return lambda q, k, v: flashbias_attention(q, k, v, bias, backend=backend, **shape.options)


def _sdpa(kernel: SDPBackend, bias: ScoreBias | None, causal: bool) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, mask = q.shape[-2], None
        if bias is not None:
            mask = bias.dense(n, n, dtype=torch.float32)
            if causal:
                hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
                mask = mask.masked_fill(hidden, float("-inf"))
            mask = mask.to(q.dtype)[None]
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                *(x.flatten(0, -4) for x in (q, k, v)), mask, is_causal=causal and bias is None
            ).reshape(*q.shape[:-1], v.shape[-1])

    return call


def _flex(bias: ScoreBias, causal: bool) -> Attention:
    compiled = torch.compile(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = bias.dense(q.shape[-2], k.shape[-2], dtype=torch.float32).to(q.dtype)

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s + dense[h, i, j]
            return torch.where(i >= j, s, float("-inf")) if causal else s

        return compiled(q, k, v, score_mod=score)

    return call


def step(attention: Attention, qkv: list[Tensor], leaves: list[Tensor], dout: Tensor) -> None:
    """One forward and backward pass; gradients land in the leaves."""
    for leaf in (*qkv, *leaves):
        leaf.grad = None
    attention(*qkv).backward(dout)


def error(shape: Shape, qkv: list[Tensor], bias: ScoreBias | None, dout: Tensor) -> float:
    """Largest relative error of the gradients of q, k and v; NaN where there is no reference."""
    if shape.n > LONGEST or len(shape.batch) > 1:
        return float("nan")
    own = None if bias is None else learnt(bias.select_heads([0]))[0]
    exact = [x.detach()[0, :1].double().requires_grad_() for x in qkv]
    flashbias_attention(*exact, own, backend="eager", **shape.options).backward(
        dout[0, :1].double()
    )
    worst = 0.0
    for found, truth in zip(qkv, exact, strict=True):
        assert found.grad is not None and truth.grad is not None
        wrong = (found.grad[0, :1].double() - truth.grad).norm() / truth.grad.norm()
        worst = max(worst, float(wrong))
    return worst


def main() -> None:
    """Time every peer on every shape; print and write a table."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_backward.csv")
    options = parser.parse_args()
    machine = [torch.cuda.get_device_name(), torch.__version__, triton.__version__]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        times = ["median_ms", "p20_ms", "p80_ms"]
        writer.writerow(["shape", "peer", *times, "peak_mib", "error", "card", "torch", "triton"])
        for name in options.shapes:
            shape = SHAPES[name]
            torch.manual_seed(0)
            inputs = shape.inputs(torch.bfloat16, DEVICE)
            qkv = [x.detach().requires_grad_() for x in inputs]
            bias, leaves = learnt(None if shape.bias is None else shape.bias(shape, DEVICE))
            dout = torch.randn_like(inputs[2])
            for peer, attention, has_bias in peers(shape, bias):
                try:
                    own = leaves if has_bias else []
                    step(attention, qkv, own, dout)
                    wrong = error(shape, qkv, bias if has_bias else None, dout)
                    for leaf in (*qkv, *own):
                        leaf.grad = None
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    step(attention, qkv, own, dout)
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                    middle, low, high = triton.testing.do_bench(
                        partial(step, attention, qkv, own, dout),
                        warmup=50,
                        rep=200,
                        quantiles=[0.5, 0.2, 0.8],
                    )
                except (RuntimeError, ValueError) as problem:
                    print(f"{name:30s} {peer:22s} {str(problem).splitlines()[0][:70]}")
                    continue
                row = [f"{ms:.4f}" for ms in (middle, low, high)]
                writer.writerow([name, peer, *row, f"{peak:.1f}", f"{wrong:.2e}", *machine])
                file.flush()
                print(
                    f"{name:30s} {peer:22s} {middle:8.4f} ms {peak:9.1f} MiB  error {wrong:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Up to which rank does a factor on the scores pay? Beside the matrix of factors, on one card.

python scripts/bench_score_scale.py [--sizes 32 64] [--ranks 1 2 3 4 5 6 8] [--output FILE.csv]

softmax(scale (q k^T) * b) v with b of rank R is computed with head size R D. Beside it: plain torch
operations, which make the matrix b in every call, and compiled FlexAttention, which reads one that
was made beforehand and gives no gradient for it. Forward, and forward plus backward. Ranks above
`largest_rank`, which `flashbias_attention` refuses (column `accepted`), are timed through the same
channels. `error` is that of the output against float64.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import LowRank, flashbias_attention
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.attention.multiplicative import largest_rank, repeat_channels
from flashbias_convert.benchmark.timing import measure

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("way", "rank", "d", "n", "heads", "accepted", "forward_ms", "both_ms", "peak_mib",
           "error", "status", "dtype", "device", "torch")  # fmt: skip
Attend = Callable[[Tensor, Tensor, Tensor, LowRank], Tensor]


def ours(backend: str) -> Attend:
    """Longer rows, whatever the rank."""

    def attend(q: Tensor, k: Tensor, v: Tensor, term: LowRank) -> Tensor:
        plain: dict[str, Any] = dict.fromkeys(("scale", "query_start", "key_mask"))
        args = check_arguments(q, k, v, causal=False, cosine=False, **plain)
        q, k, v, args = repeat_channels(q, k, v, term, args)
        return flashbias_attention(q, k, v, scale=args.scale, backend=backend)

    return attend


def formula(q: Tensor, k: Tensor, v: Tensor, term: LowRank) -> Tensor:
    """Every matrix there is."""
    matrix = term.dense(q.shape[-2], k.shape[-2], dtype=q.dtype)
    return ((q @ k.mT) * q.shape[-1] ** -0.5 * matrix).softmax(-1) @ v


def flex(term: LowRank, n: int, dtype: torch.dtype) -> Attend:
    """FlexAttention with the matrix, made once."""
    from torch.nn.attention.flex_attention import flex_attention

    matrix = term.dense(n, n).detach().to(dtype)
    compiled: Any = torch.compile(
        lambda q, k, v, m: flex_attention(q, k, v, lambda s, b, h, i, j: s * m[h, i, j]),
        dynamic=False,
    )
    return lambda q, k, v, _: compiled(q, k, v, matrix)


def timed(attend: Attend, inputs: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of one way."""
    device = torch.device(args.device)
    q, k, v, phi_q, phi_k = inputs
    wide = LowRank(phi_q=phi_q.detach(), phi_k=phi_k.detach())
    truth = formula(*(x.detach()[:, :1].double() for x in (q, k, v)), wide.select_heads([0]))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v, LowRank(phi_q=phi_q, phi_k=phi_k))

    def both() -> None:
        for x in inputs:
            x.grad = None
        attend(q, k, v, LowRank(phi_q=phi_q, phi_k=phi_k)).sum().backward()

    wrong = (forward()[:, :1].double() - truth).norm() / truth.norm()
    first, second = (
        measure(call, device, repeats=args.repeats, budget_s=20) for call in (forward, both)
    )
    return {
        "forward_ms": f"{first.times.median_ms:.4f}", "both_ms": f"{second.times.median_ms:.4f}",
        "peak_mib": "" if second.peak_mib is None else f"{second.peak_mib:.0f}",
        "error": f"{float(wrong):.2e}", "status": "ok",
    }  # fmt: skip


def main() -> None:
    """Print and write a row per way, rank and head size."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "scripts/results/bench_score_scale.csv"
    )
    args = parser.parse_args()
    dtype, n, heads = getattr(torch, args.dtype), args.tokens, args.heads
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for d in args.sizes:
            for rank in args.ranks:
                torch.manual_seed(0)
                draw = {"device": args.device}
                qkv = [torch.randn(1, heads, n, d, **draw).to(dtype) for _ in range(3)]
                factors = [torch.randn(heads, n, rank, **draw) / rank**0.25 for _ in range(2)]
                inputs = [x.requires_grad_() for x in (*qkv, *factors)]
                term = LowRank(phi_q=factors[0], phi_k=factors[1])
                ways: dict[str, Attend] = {"flashbias": ours(args.backend), "formula": formula}
                if not args.no_flex:
                    ways["FlexAttention, matrix"] = flex(term, n, dtype)
                for way, attend in ways.items():
                    row = {"way": way, "rank": rank, "d": d, "n": n, "heads": heads,
                           "accepted": rank <= largest_rank(d), "dtype": args.dtype,
                           "torch": torch.__version__,
                           "device": torch.cuda.get_device_name() if cuda else "CPU"}  # fmt: skip
                    try:
                        row |= timed(attend, inputs, args)
                    except (RuntimeError, NotImplementedError, ValueError) as problem:
                        out = isinstance(problem, torch.OutOfMemoryError)
                        row["status"] = "out of memory" if out else str(problem)[:100]
                    torch._dynamo.reset()
                    writer.writerow(row)
                    file.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()

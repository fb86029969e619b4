"""Up to which rank does a factor on the scores pay? Beside the matrix of factors, on one card.

python scripts/bench_score_scale.py [--sizes 16 32 64 128] [--ranks 1 2 ...] [--output FILE.csv]

softmax(scale (q k^T) * b) v with b of rank R is computed with head size R D. Beside it: plain torch
operations, which make the matrix b in every call, and compiled FlexAttention, which reads one that
was made beforehand and gives no gradient for it. Forward, and forward plus backward. Ranks above
`largest_rank`, which `flashbias_attention` refuses (column `accepted`), are timed through the same
channels; where rows are longer than the Triton kernels take (column `kernel`), `auto` is torch's
attention. `error` is that of the output against float64; a way that is off by more than `WRONG` is
wrong, and compared with nobody. `forward_ms` and `both_ms` are times on the card alone (CUDA graph
replays), `forward_call_ms` and `both_call_ms` of eager calls, Python included, which stand in for
them where there is no graph. For every head size the largest rank up to which ours takes no longer
than each of the others is printed and written to FILE.md, beside the one that is accepted.
Sizes and ranks that the clock leaves out (`--stop-s`) are told; --resume keeps the rows of the same
device and version of torch and measures the others.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from failures import is_lost, lacked_beside_others, no_row
from row_file import RowFile
from torch import Tensor
from turns import alone

from flashbias_convert import LowRank, flashbias_attention
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.attention.backends import MAX_HEAD_SIZE
from flashbias_convert.attention.multiplicative import largest_rank, repeat_channels
from flashbias_convert.benchmark.timing import measure

ROOT = Path(__file__).resolve().parent.parent
OURS, FORMULA, FLEX = "flashbias", "formula", "FlexAttention, matrix"
RANKS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20]
#: Relative error from which on an output is wrong: rounding to bf16 gives 2e-3 to 1e-2.
WRONG = 0.03
COLUMNS = ("way", "rank", "d", "n", "heads", "accepted", "kernel", "forward_ms", "both_ms",
           "forward_call_ms", "both_call_ms", "peak_mib", "error", "status", "dtype", "device",
           "torch")  # fmt: skip
#: what makes a row the same row
KEY = ("way", "rank", "d", "n", "heads", "dtype", "device")
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
    matrix, compiled = term.dense(n, n).detach().to(dtype), _compiled_flex()
    return lambda q, k, v, _: compiled(q, k, v, matrix)


@functools.cache
def _compiled_flex() -> Any:
    """The same for all ranks, so that a size compiles once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(
        lambda q, k, v, m: flex_attention(q, k, v, lambda s, b, h, i, j: s * m[h, i, j]),
        dynamic=False,
    )


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
    both()  # compiles, beside others
    with alone():
        first, second = (
            measure(call, device, repeats=args.repeats, budget_s=20) for call in (forward, both)
        )
        calls = [found.times.median_ms for found in (first, second)]
        alone_ms = calls if device.type == "cpu" else [replayed_ms(forward), replayed_ms(both)]
    return {
        "forward_ms": f"{alone_ms[0]:.4f}", "both_ms": f"{alone_ms[1]:.4f}",
        "forward_call_ms": f"{calls[0]:.4f}", "both_call_ms": f"{calls[1]:.4f}",
        "peak_mib": "" if second.peak_mib is None else f"{second.peak_mib:.0f}",
        "error": f"{float(wrong):.2e}", "status": "ok" if float(wrong) < WRONG else "wrong",
    }  # fmt: skip


def replayed_ms(call: Callable[[], Any]) -> float:
    """Median milliseconds on the card, without the host."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(call, rep=20, return_mode="median"))


def pays(rows: list[dict[str, Any]], d: int, clock: str, other: str) -> int:
    """The largest measured rank up to which ours is no slower than another way that is correct.

    0 if it is slower from the start; a rank above which it is faster again does not count.
    """
    most = 0
    own = [r for r in rows if int(r["d"]) == d and r["status"] == "ok"]
    for rank in sorted({int(r["rank"]) for r in rows if int(r["d"]) == d}):
        times = {r["way"]: float(r[clock]) for r in own if int(r["rank"]) == rank}
        if OURS not in times or times[OURS] > times.get(other, math.inf):
            break
        most = rank
    return most


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: up to which rank ours is no slower, by the clock; and what is accepted."""
    out = ["| head size | accepted | beside the matrix made in the call: forward | with gradients "
           "| beside FlexAttention with a matrix made before: forward | with gradients |",
           "|---|---|---|---|---|---|"]  # fmt: skip
    for d in dict.fromkeys(int(r["d"]) for r in rows):
        cells = [largest_rank(d)]
        cells += [
            pays(rows, d, clock, other)
            for other in (FORMULA, FLEX)
            for clock in ("forward_ms", "both_ms")
        ]
        out.append(f"| {d} | {' | '.join(map(str, cells))} |")
    ranks = sorted({int(r["rank"]) for r in rows})
    out += ["", f"Ranks that were measured: {', '.join(map(str, ranks))}. {rows[0]['device']}."]
    return "\n".join(out) + "\n"


def main() -> None:
    """Print and write a row per way, rank and head size."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no rank after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "scripts/results/bench_score_scale.csv"
    )
    args = parser.parse_args()
    started = time.monotonic()
    table = RowFile(args.output, COLUMNS, key=KEY, versions=("torch",), resume=args.resume)
    for d in args.sizes:
        torch._dynamo.reset()  # it would give up at the eighth size
        for rank in args.ranks:
            if left_of(d, rank, args, table) and time.monotonic() - started > args.stop_s:
                print(f"head size {d}, rank {rank}: not measured")
                continue
            for row in rows_of(d, rank, args, table):
                print(table.add(row), flush=True)
                if is_lost(row["status"]):  # all that follows would fail, too
                    raise SystemExit(1)
    here = facts(0, 0, args)
    rows = table.of({name: here[name] for name in ("n", "heads", "dtype", "device", "torch")})
    if rows:
        told = summary(sorted(rows, key=lambda r: (int(r["d"]), int(r["rank"]))))
        args.output.with_suffix(".md").write_text(told)
        print(told)


def facts(d: int, rank: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is known of a row before it is measured, its way aside."""
    cuda = torch.device(args.device).type == "cuda"
    device = torch.cuda.get_device_name() if cuda else "CPU"
    return {"rank": rank, "d": d, "n": args.tokens, "heads": args.heads, "dtype": args.dtype,
            "device": device, "torch": torch.__version__}  # fmt: skip


def left_of(d: int, rank: int, args: argparse.Namespace, table: RowFile) -> list[str]:
    """The ways that have no row."""
    ways, known = (OURS, FORMULA, *(() if args.no_flex else (FLEX,))), facts(d, rank, args)
    return [way for way in ways if table.find({**known, "way": way}) is None]


def rows_of(
    d: int, rank: int, args: argparse.Namespace, table: RowFile
) -> Iterator[dict[str, Any]]:
    """A row per way that has none."""
    left = left_of(d, rank, args, table)
    if not left:
        return
    dtype, n, heads = getattr(torch, args.dtype), args.tokens, args.heads
    torch.manual_seed(0)
    draw = {"device": args.device}
    qkv = [torch.randn(1, heads, n, d, **draw).to(dtype) for _ in range(3)]
    factors = [torch.randn(heads, n, rank, **draw) / rank**0.25 for _ in range(2)]
    inputs = [x.requires_grad_() for x in (*qkv, *factors)]
    term = LowRank(phi_q=factors[0], phi_k=factors[1])
    ways: dict[str, Callable[[], Attend]] = {
        OURS: lambda: ours(args.backend), FORMULA: lambda: formula,
        FLEX: lambda: flex(term, n, dtype),
    }  # fmt: skip
    for way in left:
        row = {"way": way, "accepted": rank <= largest_rank(d),
               "kernel": rank * d <= MAX_HEAD_SIZE, **facts(d, rank, args)}  # fmt: skip
        try:
            row |= timed(ways[way](), inputs, args)
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            if lacked_beside_others(problem):
                print(no_row(f"{way}, rank {rank}", problem), flush=True)
                continue
            out = isinstance(problem, torch.OutOfMemoryError)
            row["status"] = "out of memory" if out else str(problem)[:100]
        yield row


if __name__ == "__main__":
    main()

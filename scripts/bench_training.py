"""Time and memory of whole training steps: ALiBi GPT-2, and a plain Transformer with a bias.

python scripts/bench_training.py gpt2 [--tokens 2048] [--layers 48] [--batch 1]
python scripts/bench_training.py plain [--tokens 4096 8192 16384 32768 65536] [--learnable]

The models of the FlashBias paper: GPT-2 of 48 layers, 1,600 channels, 50 heads and 1.5 billion
parameters, causal, with ALiBi; and 8 layers of 512 channels, 8 heads and 1,024 channels of
feed-forward with a bias of rank 8, which all layers share. Weights are fp32 under bf16 autocast, a
step is forward, backward and AdamW; `--checkpoint` computes layers again in the backward pass,
`--compile` compiles each layer. Beside ours: no bias, torch's attention with the dense bias (made
once, in bf16, causality included; in every layer if it is trained) and compiled FlexAttention
(ALiBi in its score_mod, else the dense bias).

`peak_mib` is everything, weights and optimizer included. `error_loss` and `error_gradient` are
relative errors of a step of 2 layers and at most 1,024 tokens against float64, `plain_gradient`
that of the formula in the same dtype: a row whose gradient is off by more than twice as much is
wrong. Every row has a process of its own: one that dies, or runs out of memory, says so; what lacks
memory beside other commands (`beside.py`) is no row. Adds rows to bench_training.csv (`--resume`
leaves out those it has) and draws them, and writes them as markdown beside the paper's numbers.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import row_file
import torch
from failures import lacked_beside_others
from training_figure import draw
from training_models import (
    FLEX,
    NO_BIAS,
    OURS,
    PLAIN,
    SDPA,
    SIZES,
    loss_of,
    setting,
    step_errors,
    trained,
)
from turns import Wait, in_turns

from flashbias_convert.benchmark.timing import measure

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "model", "attention", "tokens", "batch", "median_ms", "p20_ms", "p80_ms", "s_per_100",
    "peak_mib", "status", "error_loss", "error_gradient", "plain_gradient", "repeats",
    "first_call_s", "layers", "channels", "heads", "parameters", "learnable", "checkpoint",
    "compile", "dtype", "device", "torch",
)  # fmt: skip
#: what makes a row the same row
KEY = ("model", "attention", "tokens", "batch", "layers", "channels", "heads", "learnable",
       "checkpoint", "compile", "dtype")  # fmt: skip
CRASHED, OUT_OF_MEMORY = "crashed", "out of memory"
#: rows whose processes start together, and compare a small step with float64 beside each other
TOGETHER = 8


def facts(args: argparse.Namespace, name: str, tokens: int) -> dict[str, Any]:
    """What is known of a row before it is measured. Leaves the card alone."""
    _, channels, heads, *_ = SIZES[args.model]
    return {
        "model": args.model, "attention": name, "tokens": tokens, "batch": args.batch,
        "layers": args.layers, "channels": args.channels or channels, "heads": args.heads or heads,
        "learnable": args.learnable, "checkpoint": args.checkpoint, "compile": args.compile,
        "dtype": args.dtype, "torch": torch.__version__,
    }  # fmt: skip


def write(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Add a row to the table and print it."""
    row_file.append(args.output, COLUMNS, row)
    shown = [row.get(x, "-") for x in ("median_ms", "peak_mib", "error_gradient", "status")]
    print(f"{row['model']:6s} {row['tokens']:6d} {row['attention']:18s}", *shown, flush=True)


def bench_row(args: argparse.Namespace, name: str, tokens: int, wait: Wait) -> None:
    """Measure one way to attend at one length, and write its row."""
    cuda = torch.device(args.device).type == "cuda"
    row = facts(args, name, tokens)
    row["device"] = torch.cuda.get_device_name() if cuda else "CPU"
    told, fine = _tried(functools.partial(judged, name, tokens, args))
    row |= told
    if cuda and fine:
        torch.cuda.empty_cache()
    wait()
    if fine:
        row |= _tried(functools.partial(timed, name, tokens, args))[0]
    write(args, row)


def _tried(step: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Columns of a row, and whether there are any: a step that fails is a row.

    Raises:
        Exception: memory lacked that others may hold, which is no result.
    """
    try:
        return step(), True
    except Exception as problem:
        if lacked_beside_others(problem):
            raise
        return {"status": _status(problem)}, False


def _status(problem: Exception) -> str:
    if isinstance(problem, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if type(problem).__name__ == "AcceleratorError":
        return CRASHED
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:120]


def judged(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Errors of a small step, and whether they are those of rounding."""
    if name == NO_BIAS:
        return {"status": "ok"}
    loss, gradient = step_errors(name, args, tokens)
    _, expected = step_errors(PLAIN, args, tokens)
    # fp32 and float64 agree to rounding; NaN is never fine
    fine = gradient <= 2 * max(expected, 100 * torch.finfo(torch.float32).eps)
    told = {"error_loss": loss, "error_gradient": gradient, "plain_gradient": expected}
    return {k: f"{v:.2e}" for k, v in told.items()} | {"status": "ok" if fine else "wrong"}


def timed(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of steps."""
    device = torch.device(args.device)
    case, model, batch = setting(name, args, tokens)
    weights = trained(case, model)
    optimizer = torch.optim.AdamW(weights, fused=device.type == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch, args).backward()
        optimizer.step()

    found = measure(step, device, repeats=args.repeats, budget_s=args.budget_s)
    times = found.times
    return {
        "median_ms": f"{times.median_ms:.3f}", "p20_ms": f"{times.p20_ms:.3f}",
        "p80_ms": f"{times.p80_ms:.3f}", "s_per_100": f"{times.median_ms / 10:.3f}",
        "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
        "repeats": times.repeats, "first_call_s": f"{found.first_call_s:.1f}",
        "parameters": sum(p.numel() for p in weights),
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Measure every row, each in a process."""
    started = time.monotonic()
    rows = row_file.read(args.output) if args.resume else []
    known = {row_file.key_of(row, KEY) for row in rows}
    calls = [(args, name, n) for n in args.tokens for name in args.attention]
    calls = [c for c in calls if row_file.key_of(facts(*c), KEY) not in known]
    left = args.stop_s - (time.monotonic() - started)
    seconds = None if math.isinf(left) else left
    for call in in_turns(bench_row, calls, together=TOGETHER, seconds=seconds):
        if args.stop_s < time.monotonic() - started:
            print(f"{call[1]}, {call[2]} tokens: not measured")
        else:
            write(args, {**facts(*call), "status": CRASHED})


def arguments() -> argparse.Namespace:
    """The words of a command."""
    cuda, names = torch.cuda.is_available(), [OURS, NO_BIAS, SDPA, FLEX]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SIZES))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--attention", nargs="+", choices=names, default=names)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--channels", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--learnable", action="store_true", help="the bias is trained, too")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=30.0, help="no more steps of a row after")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no row after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_training.csv")
    args = parser.parse_args()
    args.layers = args.layers or SIZES[args.model][0]
    plain = [2**i for i in range(12, 17)]
    args.tokens = args.tokens or ([2048] if args.model == "gpt2" else plain)
    return args


def main() -> None:
    """Measure; print and append a row per way to attend and number of tokens, and draw all."""
    args = arguments()
    row_file.begin(args.output, COLUMNS, resume=True)
    run(args)
    draw(args.output)


if __name__ == "__main__":
    main()

"""Variants of one model in one process, called in turn: ratios that the card's clock cannot move.

python scripts/alternate_models.py MODEL [--variants NAME NAME ...] [--rounds 50]
python scripts/alternate_models.py plain-20 --variants none exact --tiny --device cpu

Models and variants are those of `bench_models.py`, where each row has a process and minutes of its
own: by then a card may be warmer or cooler, which moves times by a few percent. Here every round
has one call of each variant, in an order that turns, and ratios to the first variant are those of a
round. On a card compiled variants are recorded as CUDA graphs, and replayed; others are called.
Writes a row for each variant, the median of its times, and the median and quarters of its ratios.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from bench_models import all_cases
from turns import alone
from whole_models.case import ROOT, Case, split_variant
from whole_models.measuring import compiled
from whole_models.writing import machine

#: after this no variant has anything left to compile
WARM_CALLS = 3


def main() -> None:
    """Prepare every variant, call them in turn, write and print."""
    options = parser().parse_args()
    cases = all_cases(options.tiny)
    if options.model not in cases:
        raise SystemExit(f"no model is called {options.model!r}; see bench_models.py --list")
    case, device = cases[options.model], torch.device(options.device)
    unknown = [v for v in options.variants if v not in case.variants()]
    if unknown:
        raise SystemExit(f"{options.model} has no variant {unknown[0]!r}: {case.variants()}")
    dtype = getattr(torch, options.dtype)
    with torch.no_grad():
        calls = [(v, ready(case, v, device, dtype)) for v in options.variants]
        with alone():
            times = in_rounds([call for _, (call, _) in calls], options.rounds, device)
    where = {"model": case.name, "rounds": options.rounds, **machine(device, dtype)}
    rows = [
        {"variant": variant, "how": how, **numbers(own, times[0]), **where}
        for (variant, (_, how)), own in zip(calls, times, strict=True)
    ]
    write(rows, options.output)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("model")
    found.add_argument("--variants", nargs="+", default=["none-compiled", "exact-compiled"])
    found.add_argument("--rounds", type=int, default=50)
    found.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    results = ROOT / "scripts/results/alternate_models.csv"
    found.add_argument("--output", type=Path, default=results, help="rows of other models stay")
    return found


def ready(
    case: Case, variant: str, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], Any], str]:
    """A call of a variant that has nothing left to prepare, and how it is made."""
    way, mode = split_variant(variant)
    made = case.prepare(way, device, dtype)
    model = compiled(made.model, mode)

    def call() -> Any:
        return model(*made.args, **made.kwargs)

    for _ in range(WARM_CALLS):
        call()
    if device.type != "cuda" or mode != "compiled":
        return call, "called"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()  # what a graph writes to must live as long as it

    def replay(_: Any = kept) -> None:
        graph.replay()

    return replay, "replayed"


def in_rounds(
    calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device
) -> list[list[float]]:
    """Milliseconds of each call in each round; the first round is left out."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for step in range(len(calls)):
            at = (number + step) % len(calls)
            took = timed(calls[at], device)
            if number:
                times[at].append(took)
    return times


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def numbers(own: Sequence[float], first: Sequence[float]) -> dict[str, str]:
    """Of a variant: its median time, and its ratio to the first one in the same rounds."""
    ratios = [a / b for a, b in zip(own, first, strict=True)]
    quarters = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "median_ms": f"{median(own):.4f}",
        "ratio": f"{median(ratios):.4f}",
        "ratio_p25": f"{quarters[0]:.4f}",
        "ratio_p75": f"{quarters[2]:.4f}",
    }


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows of other models and devices stay in the file."""
    of = {(row["model"], row["device"]) for row in rows}
    known: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            known = [r for r in csv.DictReader(file) if (r["model"], r["device"]) not in of]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*known, *rows])
    for row in rows:
        print(
            f"{row['model']:36s} {row['variant']:24s} {row['median_ms']:>10s} ms {row['how']}, "
            f"{row['ratio']} ({row['ratio_p25']} to {row['ratio_p75']}) of {rows[0]['variant']}"
        )


if __name__ == "__main__":
    main()

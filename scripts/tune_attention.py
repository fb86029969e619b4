"""Measure launch settings of the kernel on this card.

python scripts/tune_attention.py [--shapes NAME ...] [--output FILE.csv]

Settings are compiled in parallel processes first, then timed one by one. The CSV has one row per
shape and settings: median milliseconds. `flashbias_convert/attention/tuning.py` holds the rule
that was read off it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import os
from pathlib import Path

import torch
from attention_shapes import SHAPES, SHORT
from turns import alone

from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.tuning import LaunchSettings

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
ALL = SHAPES | SHORT


def candidates(name: str, quick: bool) -> list[LaunchSettings]:
    """Settings worth trying for a shape."""
    if (ALL[name].queries or ALL[name].n) <= 16:
        return [
            LaunchSettings(16, n, warps, depth)
            for n in (32, 64, 128, 256)
            for warps in (1, 2, 4, 8)
            for depth in (2, 3, 4, 5)
            if n * depth <= 768 and n >= 16 * warps
        ]
    wide = ALL[name].d > 64
    tiles = [(64, 64, 4, (96, 128)), (128, 64, 4, (168, None)), (128, 64, 8, (128,))]
    if wide:
        tiles = [(64, 64, 4, (168, None)), (128, 64, 8, (128, None)), (128, 128, 8, (None,))]
    if not quick:
        tiles += [(64, 32, 4, (96, None)), (64, 128, 4, (128, 168)), (128, 128, 8, (128, None))]
        tiles += [(64, 64, 4, (None,)), (128, 64, 8, (None,)), (128, 32, 8, (None,))]
        tiles += [(32, 64, 4, (None,)), (32, 32, 2, (None,)), (16, 64, 2, (None,))]
    stages = (2, 3) if wide or not quick else (3,)
    return [
        LaunchSettings(m, n, warps, depth, registers)
        for m, n, warps, caps in tiles
        for registers in caps
        for depth in stages
    ]


def run_once(job: tuple[str, LaunchSettings]) -> None:
    """Compile and run one setting; failures show again when it is timed."""
    name, settings = job
    call = make_call(name)
    try:
        with launch.forced(settings):
            call()
            torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} {settings}: {str(error).splitlines()[0][:100]}", flush=True)


def make_call(name: str):  # type: ignore[no-untyped-def]
    """A function without arguments that runs the shape's attention once."""
    shape = ALL[name]
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    bias = None if shape.bias is None else PreparedBias(shape.bias(shape, DEVICE))
    return lambda: flashbias_attention(q, k, v, bias, backend="triton", **shape.options)


def time_ms(call) -> float:  # type: ignore[no-untyped-def]
    """Median milliseconds on the card, from CUDA graph replays: no launch gaps."""
    import triton

    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(call, rep=30, return_mode="median"))


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(ALL))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tuning.csv")
    parser.add_argument("--quick", action="store_true", help="only the usual winners")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options = parser.parse_args()
    jobs = [(name, s) for name in options.shapes for s in candidates(name, options.quick)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(run_once, jobs, chunksize=4)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with alone(), options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in dataclasses.fields(LaunchSettings)]
        writer.writerow(["shape", *names, "ms", "card"])
        for name in options.shapes:
            call = make_call(name)
            results = []
            for settings in candidates(name, options.quick):
                try:
                    with launch.forced(settings):
                        results.append((time_ms(call), settings))
                except Exception:
                    continue
            for ms, s in sorted(results, key=lambda r: r[0]):
                card = torch.cuda.get_device_name()
                writer.writerow([name, *dataclasses.astuple(s), f"{ms:.4f}", card])
            for ms, s in sorted(results, key=lambda r: r[0])[:4]:
                print(f"{name:30s} {ms:.4f} ms {dataclasses.astuple(s)}", flush=True)
            file.flush()


if __name__ == "__main__":
    main()

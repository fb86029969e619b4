"""Measure launch settings of the kernel on this card.

python scripts/tune_attention.py [--shapes NAME ...] [--output FILE.csv]

Settings are compiled in parallel processes first, then timed one by one. The CSV has one row per
shape and settings: median milliseconds. `flashbias_convert/attention/tuning.py` holds the rule
that was read off it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import os
from pathlib import Path

import torch
from attention_shapes import SHAPES

from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.tuning import LaunchSettings

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")


def candidates(quick: bool) -> list[LaunchSettings]:
    """Settings worth trying."""
    if quick:
        usual = itertools.product(((64, 32), (64, 64), (128, 64)), (2, 3))
        return [LaunchSettings(*blocks, 4, stages) for blocks, stages in usual]
    grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    settings = [LaunchSettings(*each) for each in grid]
    return [s for s in settings if not (s.block_m == 64 and s.num_warps == 8)]


def use(settings: LaunchSettings) -> None:
    """Make the launcher use these settings."""
    launch.launch_settings = lambda **_: settings  # type: ignore[assignment]
    launch._PLANS.clear()


def run_once(job: tuple[str, LaunchSettings]) -> None:
    """Compile and run one setting; failures show again when it is timed."""
    name, settings = job
    call = make_call(name)
    use(settings)
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} {settings}: {str(error).splitlines()[0][:100]}", flush=True)


def make_call(name: str):  # type: ignore[no-untyped-def]
    """A function without arguments that runs the shape's attention once."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    bias = None if shape.bias is None else PreparedBias(shape.bias(shape, DEVICE))
    return lambda: flashbias_attention(q, k, v, bias, backend="triton", **shape.options)


def time_ms(call) -> float:  # type: ignore[no-untyped-def]
    """Median milliseconds on the card, from CUDA graph replays: no launch gaps."""
    import triton

    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(call, rep=30, return_mode="median"))


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tuning.csv")
    parser.add_argument("--quick", action="store_true", help="only the usual winners")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options = parser.parse_args()
    jobs = [(name, s) for name in options.shapes for s in candidates(options.quick)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(run_once, jobs, chunksize=4)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["shape", "block_m", "block_n", "num_warps", "num_stages", "ms", "card"])
        for name in options.shapes:
            call = make_call(name)
            results = []
            for settings in candidates(options.quick):
                use(settings)
                try:
                    results.append((time_ms(call), settings))
                except Exception:
                    continue
            for ms, s in sorted(results, key=lambda r: r[0]):
                writer.writerow([name, s.block_m, s.block_n, s.num_warps, s.num_stages,
                                 f"{ms:.4f}", torch.cuda.get_device_name()])  # fmt: skip
            for ms, s in sorted(results, key=lambda r: r[0])[:4]:
                print(f"{name:30s} {ms:.4f} ms  BM={s.block_m} BN={s.block_n} "
                      f"warps={s.num_warps} stages={s.num_stages}", flush=True)  # fmt: skip
            file.flush()


if __name__ == "__main__":
    main()

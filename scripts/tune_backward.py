"""Measure launch settings of the backward kernels on this card.

python scripts/tune_backward.py [--kernels queries keys all] [--head-sizes 32 64 128]
    [--columns 0 16] [--lengths 1024 4096] [--trained] [--output FILE.csv]

Settings are compiled in parallel processes first, then timed one by one: a training step (CUDA
graph replays, bf16, 8 heads) in which only the gradients that a kernel makes are asked for. Those
whose sums a thread could not hold in registers are left out, and so is what is slower than the
present settings by more than `HOPELESS` at the first length. The table has a row per call and
settings, the present ones marked; `flashbias_convert/attention/tuning.py` holds the rule that is
read off it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from backward_step import Step
from measure_training_costs import HEADS
from measure_training_costs import Job as Call
from turns import alone

from flashbias_convert.attention import backward_launch
from flashbias_convert.attention.tuning import LaunchSettings, backward_settings

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("queries", "keys", "all")
#: fp32 numbers of sums and tiles that a thread may hold, and the fewest that make it worth while
MOST_HELD, LEAST_HELD = 224, 40
#: times the present settings from which on others are not tried at further lengths
HOPELESS = 1.3
FIELDS = ("kernel", "d", "columns", "trained", "n", *(f.name for f in dataclasses.fields(
    LaunchSettings)), "present", "ms", "card", "torch", "triton")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel for one kind of call.

    Attributes:
        kernel: see `tuning.backward_settings`.
        d, columns: head size, and factor columns.
        trained: whether factors get gradients.
    """

    kernel: str
    d: int
    columns: int
    trained: bool

    def present(self, n: int) -> LaunchSettings:
        """What is launched now."""
        return backward_settings(
            self.kernel, m=n, d=self.d, dv=self.d, columns=self.columns, half=True
        )

    def held(self, settings: LaunchSettings) -> float:
        """Numbers of fp32 that a thread holds at once, about: sums, scores and their gradients."""
        m, n, wide = settings.block_m, settings.block_n, self.d
        extra = self.columns if self.trained else 0
        sums = {"queries": m * (wide + extra), "keys": n * (2 * wide + extra)}
        sums["all"] = sums["keys"] + m * wide  # a share of those of queries
        return (sums[self.kernel] + 2 * m * n) / (32 * settings.num_warps)

    def candidates(self) -> list[LaunchSettings]:
        """Settings worth trying."""
        blocks, depths = (32, 64, 128), (2, 3)
        found = [
            LaunchSettings(m, n, warps, depth, registers)
            for m, n, warps, depth in itertools.product(blocks, blocks, (4, 8), depths)
            # so that three or four programs share a multiprocessor, or two of twice the size
            for registers in ((None, 128) if warps == 8 else (None, 128, 168))
        ]
        # a wide product of a tensor core has 64 rows of what it adds to
        rows = {"queries": "block_m", "keys": "block_n", "all": "block_n"}[self.kernel]
        return [
            s for s in found
            if getattr(s, rows) >= 16 * s.num_warps and LEAST_HELD <= self.held(s) <= MOST_HELD
        ]  # fmt: skip

    def step(self, n: int, scores: int, device: str) -> Step:
        """A training step in which this kernel makes the gradients."""
        way = "atomics" if self.kernel == "all" else "triton"
        call = Call(self.d, n, way, "bfloat16", self.columns, self.trained, False, scores, device)
        whole = call.step()
        q, k, v, *factors = whole.wanted
        wanted = {"queries": [q, *factors[:1]], "keys": [k, v, *factors[1:]]}
        for tensor in whole.wanted:
            tensor.requires_grad_(
                self.kernel == "all" or any(tensor is w for w in wanted[self.kernel])
            )
        return Step(whole.forward, wanted.get(self.kernel, whole.wanted), whole.dout)


Trial = tuple[Case, LaunchSettings]


def compile_one(trial: Trial, n: int, device: str) -> bool:
    """Compile and run settings once; whether that works."""
    case, settings = trial
    try:
        with backward_launch.forced(case.kernel, settings):
            case.step(n, HEADS * n * n, device)()
            torch.cuda.synchronize()
        return True
    except Exception as problem:  # too much shared memory, most often
        print(case, settings, (str(problem).splitlines() or [""])[0][:80], flush=True)
        return False


def time_ms(step: Step) -> float:
    """Median milliseconds of a step on the card alone."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(step, rep=10, return_mode="median"))


def measure_case(
    case: Case, found: list[LaunchSettings], options: argparse.Namespace, table: Any
) -> None:
    """Rows of one case at all lengths."""
    import triton

    where = [torch.cuda.get_device_name(), torch.__version__, triton.__version__]
    for n in options.lengths:
        present = case.present(n)
        best: dict[LaunchSettings, float] = {}
        for settings in dict.fromkeys([present, *found]):
            try:
                with backward_launch.forced(case.kernel, settings):
                    ms = time_ms(case.step(n, options.scores, options.device))
            except RuntimeError as problem:  # it may fail with other strides than the smallest call
                print(case, n, settings, str(problem).splitlines()[0][:80], flush=True)
                continue
            best[settings] = ms
            table.writerow([*dataclasses.astuple(case), n, *dataclasses.astuple(settings),
                            int(settings == present), f"{ms:.4f}", *where])  # fmt: skip
        if present not in best:
            break
        found = [s for s in found if best.get(s, math.inf) <= HOPELESS * best[present]]
        for settings, ms in sorted(best.items(), key=lambda item: item[1])[:3]:
            print(case, n, f"{ms:.4f} ms, now {best[present]:.4f}", dataclasses.astuple(settings),
                  flush=True)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The words of a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--columns", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--trained", action="store_true", help="factors, too")
    parser.add_argument("--scores", type=int, default=2**26, help="of a call, about")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no case after")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tune_backward.csv")
    return parser.parse_args()


def main() -> None:
    """Compile, time, print and write."""
    options, started = arguments(), time.monotonic()
    cases = [
        Case(kernel, d, columns, options.trained and columns > 0)
        for d, columns, kernel in itertools.product(
            options.head_sizes, options.columns, options.kernels
        )
    ]
    trials = [(case, settings) for case in cases for settings in case.candidates()]
    print(f"{len(trials)} settings of {len(cases)} kernels", flush=True)
    longest = max(options.lengths)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        jobs = [(trial, longest, options.device) for trial in trials]
        works = pool.starmap(compile_one, jobs, chunksize=2)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with alone(), options.output.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(FIELDS)
        for case in cases:
            if time.monotonic() - started > options.stop_s:
                print(f"stopped before {case}")
                break
            found = [s for (c, s), fine in zip(trials, works, strict=True) if c == case and fine]
            measure_case(case, found, options, table)
            file.flush()


if __name__ == "__main__":
    main()

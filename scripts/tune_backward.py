"""Measure launch settings of the backward kernels on this card.

python scripts/tune_backward.py [--kernels queries keys all] [--head-sizes 32 64 128]
    [--columns 0 16] [--lengths 1024 4096] [--trained] [--stop-s S] [--resume] [--output FILE.csv]

Settings are compiled in parallel processes, a few kernels' at a time, and then timed one by one,
while nothing compiles: a training step (CUDA graph replays, bf16, 8 heads) in which only the
gradients that a kernel makes are asked for. Those whose sums a thread could not hold in registers
are left out, and so is what is slower than the present settings by more than `HOPELESS` at the
first length. The table has a row per call and settings, the present ones marked, also of those that
fail, with the reason; --resume keeps the rows of this card and these versions and neither compiles
nor times them again. `flashbias_convert/attention/tuning.py` holds the rule that is read off it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from backward_cases import KERNELS, Case
from backward_step import Step
from failures import is_lost, state_of_row
from measure_training_costs import HEADS
from row_file import RowFile
from turns import alone

from flashbias_convert.attention import backward_launch
from flashbias_convert.attention.tuning import LaunchSettings

ROOT = Path(__file__).resolve().parent.parent
#: times the present settings from which on others are not tried at further lengths
HOPELESS = 1.3
SETTINGS = tuple(f.name for f in dataclasses.fields(LaunchSettings))
FIELDS = ("kernel", "d", "columns", "trained", "n", *SETTINGS, "present", "ms", "scores", "state",
          "card", "torch", "triton")  # fmt: skip
#: what makes a row the same row
KEY = ("kernel", "d", "columns", "trained", "n", *SETTINGS, "scores", "card")
#: the state of a row with a time
OK = "ok"


Trial = tuple[Case, LaunchSettings]


def compile_one(trial: Trial, n: int, device: str) -> str | None:
    """Compile and run settings once; how that ended, or None if others had the memory for it."""
    case, settings = trial
    try:
        with backward_launch.forced(case.kernel, settings):
            case.step(n, HEADS * n * n, device)()
            if device != "cpu":
                torch.cuda.synchronize()
        return OK
    except Exception as problem:  # too much shared memory, most often
        return state_of_row(f"{case}, {settings}", problem)


def time_ms(step: Step) -> float:
    """Median milliseconds of a step on the card alone."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(step, rep=10, return_mode="median"))


@dataclass(frozen=True)
class Tuning:
    """What is known, and what is asked for.

    Attributes:
        options: the words of the command.
        table: takes the rows.
        where: card and versions.
        ends: no settings are begun after this, see `time.monotonic`.
    """

    options: argparse.Namespace
    table: RowFile
    where: dict[str, str]
    ends: float

    def row(self, case: Case, n: int, settings: LaunchSettings) -> dict[str, Any]:
        """What is known of a row before it is measured."""
        own = {**dataclasses.asdict(case), "n": n, **dataclasses.asdict(settings)}
        present = int(settings == case.present(n))
        return {**own, "present": present, "scores": self.options.scores, **self.where}

    def known_ms(self, case: Case, n: int, settings: LaunchSettings) -> float | None:
        """Milliseconds of a row; infinite if it failed, None if there is none."""
        row = self.table.find(self.row(case, n, settings))
        return None if row is None else float(row["ms"] or math.inf)

    def walk(self, case: Case) -> Iterator[tuple[int, LaunchSettings]]:
        """Lengths and settings that have no row, in order; goes by the rows that are added.

        What is slower than the present settings by more than `HOPELESS` is not tried at further
        lengths. Nobody is judged where the present settings have no time yet.
        """
        found = case.candidates()
        for n in self.options.lengths:
            present = case.present(n)
            tried = list(dict.fromkeys([present, *found]))
            for settings in tried:
                if self.known_ms(case, n, settings) is None:
                    yield n, settings
            times = {s: self.known_ms(case, n, s) for s in tried}
            limit = times[present]
            if limit is not None:
                slow = HOPELESS * limit
                found = [s for s in found if (times[s] or 0.0) <= slow and times[s] != math.inf]

    def left(self, case: Case) -> list[LaunchSettings]:
        """Settings of a case that are to be compiled: what has no row at one of its lengths."""
        return list(dict.fromkeys(settings for _, settings in self.walk(case)))

    def fails(self, case: Case, settings: LaunchSettings, state: str) -> None:
        """Rows of settings that do not compile: at every length at which they would be tried."""
        for n, other in list(self.walk(case)):
            if other == settings:
                self.table.add(self.row(case, n, settings) | {"state": state})


def measure_case(case: Case, lacking: Sequence[LaunchSettings], tuning: Tuning) -> None:
    """Rows of one case at all lengths.

    Args:
        case: its settings are compiled, but for those that fail, which have a row.
        lacking: settings that could not be tried for want of memory; they are left for later.
        tuning: see there.

    Raises:
        SystemExit: nothing runs on the card any more, and all that follows would fail, too.
    """
    for n, settings in tuning.walk(case):
        if settings in lacking:
            continue
        if time.monotonic() > tuning.ends:
            print(f"stopped in {case}")
            break
        try:
            with backward_launch.forced(case.kernel, settings):
                ms = time_ms(case.step(n, tuning.options.scores, tuning.options.device))
            told: dict[str, Any] = {"ms": f"{ms:.4f}", "state": OK}
        except RuntimeError as problem:  # it may fail with other strides than the smallest call
            state = state_of_row(f"{case}, {n}, {settings}", problem)
            if state is None:
                continue
            told = {"state": state}
        tuning.table.add(tuning.row(case, n, settings) | told)
        if is_lost(told["state"]):
            raise SystemExit(1)
    for n in tuning.options.lengths:
        _tell(case, n, tuning)


def _tell(case: Case, n: int, tuning: Tuning) -> None:
    """Print the best settings of a case at a length."""
    times = {s: tuning.known_ms(case, n, s) for s in [case.present(n), *case.candidates()]}
    known = [(ms, s) for s, ms in times.items() if ms is not None and ms < math.inf]
    now = times[case.present(n)]
    for ms, settings in sorted(known, key=lambda pair: pair[0])[:3]:
        print(case, n, f"{ms:.4f} ms, now {now}", dataclasses.astuple(settings), flush=True)


def chunks(cases: Sequence[Case], tuning: Tuning) -> Iterator[list[Trial]]:
    """What is compiled before it is timed: of whole cases, at least two settings for a worker."""
    chunk: list[Trial] = []
    for case in cases:
        chunk += [(case, settings) for settings in tuning.left(case)]
        if len(chunk) >= 2 * tuning.options.workers:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def measure_chunk(chunk: Sequence[Trial], pool: Any, tuning: Tuning) -> None:
    """Compile, beside others, and then time, alone: the pool does nothing meanwhile."""
    longest = max(tuning.options.lengths)
    jobs = [(trial, longest, tuning.options.device) for trial in chunk]
    states = pool.starmap(compile_one, jobs, chunksize=1)
    lacking: dict[Case, list[LaunchSettings]] = {case: [] for case, _ in chunk}
    for (case, settings), state in zip(chunk, states, strict=True):
        if state is None:
            lacking[case].append(settings)
        elif state != OK:
            tuning.fails(case, settings, state)
    for case, missing in lacking.items():
        with alone():  # case by case, so that others go on in between
            measure_case(case, missing, tuning)


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
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no settings after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tune_backward.csv")
    return parser.parse_args()


def about(device: str) -> dict[str, str]:
    """The card and versions."""
    import triton

    card = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    return {"card": card, "torch": torch.__version__, "triton": triton.__version__}


def main() -> None:
    """Compile, time, print and write."""
    options, started = arguments(), time.monotonic()
    cases = [
        Case(kernel, d, columns, options.trained and columns > 0)
        for d, columns, kernel in itertools.product(
            options.head_sizes, options.columns, options.kernels
        )
    ]
    table = RowFile(
        options.output, FIELDS, key=KEY, versions=("torch", "triton"), resume=options.resume
    )
    tuning = Tuning(options, table, about(options.device), started + options.stop_s)
    left = sum(len(tuning.left(case)) for case in cases)
    print(f"{left} settings of {len(cases)} kernels", flush=True)
    if not left:
        return
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for chunk in chunks(cases, tuning):
            if time.monotonic() > tuning.ends:
                print(f"stopped before {chunk[0][0]}")
                break
            measure_chunk(chunk, pool, tuning)


if __name__ == "__main__":
    main()

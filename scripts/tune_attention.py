"""Measure launch settings of the kernel on this card.

python scripts/tune_attention.py [--shapes NAME ...] [--quick | --two-entries] [--output FILE.csv]

Shape by shape, settings are compiled in parallel processes first, then timed one by one. The table
has one row per shape and settings: median milliseconds, and whether calls are launched with them
now. `scripts/make_launch_table.py` makes the table of launch settings of it. With --two-entries
shapes whose bias is not shared have the settings that they get now, and no others.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_launches import launched
from attention_shapes import SHAPES, SHORT
from failures import is_lost, state_of_row
from row_file import RowFile
from turns import alone

from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.launch_table import launch_settings
from flashbias_convert.attention.tuning import LaunchSettings

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
ALL = SHAPES | SHORT
SETTINGS = tuple(f.name for f in dataclasses.fields(LaunchSettings))
FIELDS = ("shape", *SETTINGS, "present", "ms", "state", "card", "torch", "triton")
#: the state of a row with a time
OK = "ok"


#: two entries of the batch that share tiles of a dense bias
TWO_ENTRIES = [
    (128, 32, 8, 128), (64, 32, 4, 128), (64, 32, 4, 168), (128, 32, 4, None), (128, 64, 8, None),
    (64, 64, 4, 168),
]  # fmt: skip


def two_entries(name: str) -> list[LaunchSettings]:
    """What a call of a shape gets, then, where entries of its batch share a bias, what it would get
    if they did not, and `TWO_ENTRIES`."""
    shape, now = launched(make_call(name))
    if not shape.shared:
        return [now]
    apart = launch_settings(dataclasses.replace(shape, shared=False))
    return [now, apart] + [
        LaunchSettings(m, n, warps, depth, registers, entries=2)
        for m, n, warps, registers in TWO_ENTRIES
        for depth in (2, 3)
    ]


def present(name: str) -> LaunchSettings:
    """What a call of the shape is launched with."""
    return launched(make_call(name))[1]


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
        tiles += [(64, 32, 4, (96, 128, None)), (64, 128, 4, (128, 168))]
        tiles += [(128, 128, 8, (128, None))]
        tiles += [(64, 64, 4, (None,)), (128, 64, 8, (None,)), (128, 32, 8, (None,))]
        tiles += [(32, 64, 4, (None,)), (32, 32, 2, (None,)), (16, 64, 2, (None,))]
    stages = (2, 3) if wide or not quick else (3,)
    return [
        LaunchSettings(m, n, warps, depth, registers)
        for m, n, warps, caps in tiles
        for registers in caps
        for depth in stages
    ]


def run_once(job: tuple[str, LaunchSettings]) -> str | None:
    """Compile and run one setting; how that ended, or None if others had the memory for it."""
    name, settings = job
    try:
        with launch.forced(settings):
            make_call(name)()
            torch.cuda.synchronize()
        return OK
    except Exception as problem:  # too much shared memory, most often
        return state_of_row(f"{name}, {settings}", problem)


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


def measure(name: str, tried: Sequence[LaunchSettings], table: RowFile, where: Any) -> None:
    """Rows of one shape, whose settings are compiled; prints the best.

    Raises:
        SystemExit: nothing runs on the card any more, and all that follows would fail, too.
    """
    call, now = make_call(name), present(name)
    for settings in tried:
        try:
            with launch.forced(settings):
                told: dict[str, Any] = {"ms": f"{time_ms(call):.4f}", "state": OK}
        except Exception as problem:
            told = {"state": state_of_row(f"{name}, {settings}", problem)}
            if told["state"] is None:
                continue
        table.add(_row(name, settings, where) | told | {"present": int(settings == now)})
        if is_lost(told["state"]):
            raise SystemExit(1)
    known = [r for r in table.of({"shape": name, **where}) if r["ms"]]
    for row in sorted(known, key=lambda r: float(r["ms"]))[:4]:
        print(f"{name:30s} {row['ms']} ms", *(row[s] for s in SETTINGS), row["present"], flush=True)


def _row(name: str, settings: LaunchSettings, where: dict[str, str]) -> dict[str, Any]:
    return {"shape": name, **dataclasses.asdict(settings), **where}


def arguments() -> argparse.Namespace:
    """The words of a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", choices=list(ALL), default=list(ALL))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tuning.csv")
    parser.add_argument("--quick", action="store_true", help="only the usual winners")
    parser.add_argument(
        "--two-entries", action="store_true", help="`TWO_ENTRIES`, of shapes that share a bias"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no shape after")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    return parser.parse_args()


def main() -> None:
    """Compile, time, print and write."""
    import triton

    options, started = arguments(), time.monotonic()
    card = torch.cuda.get_device_name()
    where = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
    table = RowFile(options.output, FIELDS, key=("shape", *SETTINGS), resume=options.resume)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for name in options.shapes:
            if time.monotonic() - started > options.stop_s:
                print(f"stopped before {name}")
                break
            others = two_entries(name) if options.two_entries else candidates(name, options.quick)
            found = [present(name), *others]
            left = [s for s in dict.fromkeys(found) if table.find(_row(name, s, where)) is None]
            states = pool.map(run_once, [(name, s) for s in left], chunksize=1)
            for settings, state in zip(left, states, strict=True):
                if state not in (OK, None):
                    table.add(_row(name, settings, where) | {"state": state})
            with alone():  # shape by shape, so that others go on in between
                tried = [s for s, state in zip(left, states, strict=True) if state == OK]
                measure(name, tried, table, where)


if __name__ == "__main__":
    main()

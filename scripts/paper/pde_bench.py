"""Time and memory of the PDE solver beside other ways to compute its attention."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import row_file
import torch
from failures import lacked_beside_others, no_row
from pde_peers import ANY_ORDER, LARGEST_WEIGHT, NO_BIAS, OURS, PEERS, errors, given, plain
from pde_table import draw
from pde_task import Source, Task, surface_points
from pde_training import autocast, device_name, model_of
from torch import Tensor
from turns import Wait, in_turns

from flashbias_convert.benchmark.timing import measure
from flashbias_convert.models.pde_transformer import (
    Attend,
    FusedAttend,
    PDETransformer,
    relative_error,
)


def phases(
    model: PDETransformer, batch: tuple[Tensor, Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """What is timed: a whole step of training, and inference."""
    points, inputs, field = batch
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=args.device != "cpu")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(args):
            found = model(points, inputs)
        relative_error(found, field).mean().backward()
        optimizer.step()

    @torch.no_grad()
    def infer() -> Tensor:
        with autocast(args):
            found: Tensor = model(points, inputs)
        return found

    return {"training": step, "inference": infer}


def judged(
    attend: Attend, points: Tensor, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Errors of a peer, and by phase whether they are those of rounding."""
    judge = partial(errors, points=points[None, :2048], heads=8, size=16,
                    dtype=getattr(torch, args.dtype))  # fmt: skip
    found, expected = judge(attend), judge(plain)
    # a bias of up to 4 LARGEST_WEIGHT is a sum of fp32 numbers, and no difference of coordinates
    least = torch.finfo(torch.float32).eps * 4 * LARGEST_WEIGHT
    fine = [a <= 2 * b + least for a, b in zip(found, expected, strict=True)]
    named = zip(("error_out", "error_dq", "error_dw"), found, strict=True)
    verdict = {"training": all(fine), "inference": fine[0]}
    return {name: f"{value:.2e}" for name, value in named}, verdict


TIMED = ("phase", "peer", "points", "median_ms", "p20_ms", "p80_ms", "peak_mib", "s_per_100",
         "status", "error_out", "error_dq", "error_dw", "correct", "repeats", "first_call_s",
         "layers", "surface", "dtype", "device", "torch")  # fmt: skip
CRASHED, OUT_OF_MEMORY = "crashed", "out of memory"
PHASES = ("training", "inference")
#: rows whose processes start together, and compare a small call with float64 beside each other
TOGETHER = 8


def make_attend(peer: str, args: argparse.Namespace) -> Attend:
    """A way to attend, by its name."""
    if peer in (OURS, ANY_ORDER):
        return FusedAttend(args.backend, deterministic=peer == OURS)
    if args.kernel is not None and peer == args.kernel.stem:
        return given(args.kernel)
    return PEERS[peer]()


def bench_rows(args: argparse.Namespace, peer: str, points: int, wait: Wait) -> None:
    """Measure one peer at one number of points, training and inference; write rows that lack."""
    device = torch.device(args.device)
    pool = surface_points(args.mesh, points, args.seed).to(device)
    batch = Source(pool, points, Task(), args.seed).next(1)
    try:
        attend = make_attend(peer, args)
        known = ({}, {}) if peer == NO_BIAS else judged(attend, batch[0][0], args)
        model = model_of(args, attend, peer != NO_BIAS)
        calls = phases(model, batch, args)
    except Exception as problem:  # one that fails is a row
        if lacked_beside_others(problem):
            raise
        wait()
        for phase in left_of(args, peer, points):
            write(args, peer, points, phase, {"status": _status(problem)})
        return
    wait()
    for phase in left_of(args, peer, points):
        row = {**known[0], "correct": known[1].get(phase, "no bias")}
        try:
            row |= _timed(calls[phase], device, args)
        except Exception as problem:
            if lacked_beside_others(problem):
                print(no_row(f"{peer}, {points} points, {phase}", problem), flush=True)
                continue
            row["status"] = _status(problem)
        write(args, peer, points, phase, row)
        model.zero_grad(set_to_none=True)


def _timed(call: Callable[[], Any], device: torch.device, args: argparse.Namespace
           ) -> dict[str, Any]:  # fmt: skip
    found = measure(call, device, repeats=args.repeats, budget_s=args.budget_s)
    times = found.times
    return {
        "median_ms": f"{times.median_ms:.3f}", "p20_ms": f"{times.p20_ms:.3f}",
        "p80_ms": f"{times.p80_ms:.3f}", "s_per_100": f"{times.median_ms / 10:.3f}",
        "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
        "repeats": times.repeats, "first_call_s": f"{found.first_call_s:.1f}", "status": "ok",
    }  # fmt: skip


def _status(problem: Exception) -> str:
    """Why there is no time."""
    if isinstance(problem, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if type(problem).__name__ == "AcceleratorError":
        return CRASHED
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:120]


def write(
    args: argparse.Namespace, peer: str, points: int, phase: str, row: dict[str, Any]
) -> None:
    """Add a row to the table and print it."""
    device = torch.device(args.device)
    row = {
        "peer": peer, "points": points, "phase": phase, **row, "layers": args.layers,
        "surface": Path(args.mesh).name, "dtype": args.dtype, "torch": torch.__version__,
        "device": device_name(device),
    }  # fmt: skip
    row_file.append(table_of(args), TIMED, row)
    shown = [row.get(x, "-") for x in ("median_ms", "peak_mib", "error_out", "correct", "status")]
    print(f"{phase:9s} {points:6d} {peer:26s}", *shown, flush=True)


def table_of(args: argparse.Namespace) -> Path:
    """The file of rows."""
    path: Path = args.output / "pde_solver_speed.csv"
    return path


def known_phases(args: argparse.Namespace) -> set[tuple[str, str, str]]:
    """Peers, numbers of points and phases that have a row."""
    return {(r["peer"], r["points"], r["phase"]) for r in row_file.read(table_of(args))}


def left_of(args: argparse.Namespace, peer: str, points: int) -> list[str]:
    """The phases that have no row."""
    known = known_phases(args)
    return [phase for phase in PHASES if (peer, str(points), phase) not in known]


def timed(args: argparse.Namespace) -> None:
    """Write a row per phase, peer and number of points, and the paper's table of them."""
    started = time.monotonic()
    row_file.begin(table_of(args), TIMED, resume=args.resume)
    peers = [*args.peers, *([] if args.kernel is None else [args.kernel.stem])]
    calls = [(args, peer, points) for points in args.points for peer in peers
             if left_of(args, peer, points)]  # fmt: skip
    left = args.stop_s - (time.monotonic() - started)
    seconds = None if math.isinf(left) else left
    for _, peer, points in in_turns(bench_rows, calls, together=TOGETHER, seconds=seconds):
        if args.stop_s < time.monotonic() - started:
            print(f"{peer}, {points} points: not measured")
            continue
        for phase in left_of(args, peer, points):
            write(args, peer, points, phase, {"status": CRASHED})
    draw(table_of(args))

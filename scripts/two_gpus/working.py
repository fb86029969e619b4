"""What each process does: its share of one case after the other."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
#: the device of both processes, where they share one
SHARED_CARD = "cuda:0"
Case = Callable[[str, argparse.Namespace, torch.device, int], dict[str, Any]]


def place_of(device: str, rank: int) -> torch.device:
    """The device of a process."""
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def threads_of(place: torch.device) -> int:
    """Threads of a process: with a card each has a fair share of the cores, and leaves as many.

    With all cores each, the threads of one would spin against those of the other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // (2 * WORLD)) if place.type == "cuda" else 1


def work(options: argparse.Namespace, run: Case) -> int:
    """Run the cases of a folder; an exception ends the process at once, and says why.

    Args:
        options: of the command line.
        run: a case; all processes of a pair call it with the same words.
    """
    folder, rank = Path(options.folder), options.rank
    # where it hangs, in the log, once whoever watches gives it up: a dump of all threads while
    # they compute can end a process that only takes long
    faulthandler.register(signal.SIGUSR1)
    try:
        cases = json.loads((folder / "cases.json").read_text())
        place = place_of(options.device, rank)
        torch.set_num_threads(threads_of(place))
        if place.type == "cuda":
            torch.cuda.set_device(place)  # before NCCL chooses a card
        if options.kind != "alone":
            meet(options, place)
        tell(folder, rank, {"ready": True})
        for case in cases:
            started = time.perf_counter()
            gc.collect()  # wrappers of the case before hold models in cycles
            if place.type == "cuda":
                torch.cuda.empty_cache()
            stage(f"{case} begins")
            found = run(case, options, place, rank)
            found = found if options.kind == "alone" else worst(found)
            found["case_s"] = f"{time.perf_counter() - started:.1f}"
            tell(folder, rank, found)
        if options.kind != "alone":
            dist.destroy_process_group()
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {lines[0][:200]}")
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # leaving a group that another process still uses may hang
    return 0


def stage(name: str) -> None:
    """Note in the log, which is shown where a case fails, how far it is."""
    print(f"{time.strftime('%X')} {name}", flush=True)


def meet(options: argparse.Namespace, place: torch.device) -> None:
    """Join the other process."""
    on_card = {"device_id": place} if options.backend == "nccl" else {}
    dist.init_process_group(
        options.backend,
        init_method=f"file://{options.folder}/meet",
        rank=options.rank,
        world_size=WORLD,
        timeout=timedelta(seconds=2 * options.limit_s),  # whoever watches is to be first
        **on_card,
    )
    barrier(place)


def barrier(place: torch.device) -> None:
    """Wait for the other process."""
    dist.barrier(device_ids=[place.index] if dist.get_backend() == "nccl" else None)


def worst(found: dict[str, Any]) -> dict[str, Any]:
    """What the processes found: the first that did not pass; and of times and memory the most."""
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(everywhere, found)
    chosen: dict[str, Any] = next((f for f in everywhere if f["status"] != "passed"), found)
    for key in [key for key in chosen if key.startswith(("seconds_", "held_", "peak_"))]:
        values = [f[key] for f in everywhere if f.get(key, "") != ""]
        chosen[key] = max(values, key=float, default="")
    if "seconds_two" in chosen:
        ratio = float(chosen["seconds_two"]) / float(chosen["seconds_one"])
        chosen["two_over_one"] = f"{ratio:.3f}"
    return chosen


def tell(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Add a line for whoever watches."""
    if rank == 0:
        with (folder / "found.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

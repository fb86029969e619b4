"""Patched models on two GPUs: the same outputs as on one, and time against one.

    python scripts/check_two_gpus.py                              # two CUDA cards, NCCL
    python scripts/check_two_gpus.py --backend gloo --device cpu  # two processes on this machine
    python scripts/check_two_gpus.py --share-card                 # two processes on one card, gloo
    python scripts/check_two_gpus.py --only 'tensor*'

What serves on two is compared with what serves on one: both with the same model in float64, of
whose outputs two may be twice as far off as one, as in the tests. DDP and FSDP2 take a half of the
batch each, tensor parallelism all of it with a half of the heads, `device_map` a half of the
layers; `offload` keeps all weights on the CPU, by accelerate, and `plan` is a model that
transformers splits by its own plan as it loads it. Training (`train-ddp`, `train-fsdp`: terms and
all else) is compared step by step, by losses and by how far weights have moved. Two processes that
share a card show that the kernels do the same there; their times say nothing. Work that is shared
out (SVDs of all sites, a calibration, fits of layers, factors of many structures) must give the
same bits. `held` is what parameters and buffers take on the fuller device, `peak` what a call takes
beside them.

Two processes run one case after the other, new ones those of training. A case that fails, or takes
longer than --limit-s, ends these two, and others go on with the next one. After --stop-s what is
left is told as skipped. Rows are written one by one to `scripts/results/check_two_gpus.csv`;
--resume keeps those that passed.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from two_gpus.watching import Watched
from two_gpus.working import SHARED_CARD, WORLD, work

SCRIPT = Path(__file__).resolve()
RESULTS = SCRIPT.parent / "results/check_two_gpus.csv"
SERVED = ("tensor", "ddp", "fsdp")
PLANNED = ("plan ocr",)
TRAINED = ("train-ddp", "train-fsdp")
OFFLINE = ("svd swin", "calibrate swin", "fit pairs", "structures pairs")
COLUMNS = (
    "way", "model", "dtype", "status", "reason", "same_bits", "max_error_two", "max_error_one",
    "rms_error_two", "rms_error_one", "seconds_one", "seconds_two", "two_over_one", "samples",
    "held_mb_one", "held_mb_two", "peak_mb_one", "peak_mb_two", "case_s", "size", "backend",
    "device", "torch",
)  # fmt: skip


def main() -> int:
    """Run every case, print and write a line for each; 1 if one failed."""
    options = parser().parse_args()
    if options.share_card:
        options.device, options.backend = SHARED_CARD, "gloo"
    options.size = options.size or ("tiny" if options.device == "cpu" else "small")
    if options.rank is not None:
        return work(options, run)
    needed = {"cuda": WORLD, SHARED_CARD: 1}.get(options.device, 0)
    if torch.cuda.device_count() < needed:
        print(f"{torch.cuda.device_count()} CUDA cards, {needed} are needed", file=sys.stderr)
        return 1
    started = time.monotonic()
    rows = passed_before(options.output) if options.resume else []
    done = {case_of(row) for row in rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

        def emit(case: str, found: dict[str, Any]) -> None:
            rows.append(described(case, options) | found)
            writer.writerow(rows[-1])
            file.flush()
            print({k: v for k, v in rows[-1].items() if v != ""}, flush=True)

        for kind, count in (("pair", WORLD), ("training", WORLD), ("alone", 1)):
            todo = [case for case in cases(options)[kind] if case not in done]
            run_all(kind, count, todo, options, started + options.stop_s, emit)
    bad = [case_of(r) for r in rows if r["status"] != "passed"]
    print(f"{len(rows) - len(bad)} of {len(rows)} cases passed", *bad, sep="\n  ")
    return int(bool([r for r in rows if r["status"] == "failed"]) or not rows)


def passed_before(file: Path) -> list[dict[str, Any]]:
    """Rows of an earlier run that passed."""
    if not file.exists():
        return []
    with file.open(newline="") as opened:
        return [row for row in csv.DictReader(opened) if row["status"] == "passed"]


def case_of(row: dict[str, Any]) -> str:
    """The words of a case."""
    return f"{row['way']} {row['model']} {row['dtype']}"


def parser() -> argparse.ArgumentParser:
    """Of the command line, and of the processes that it starts."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--backend", default="nccl", help="of torch.distributed")
    found.add_argument("--device", choices=["cuda", "cpu", SHARED_CARD], default="cuda")
    found.add_argument("--share-card", action="store_true", help="two processes on one card")
    found.add_argument("--size", choices=["tiny", "small"], help="default tiny on the CPU")
    found.add_argument("--repeats", type=int, default=20, help="of each timing")
    found.add_argument("--limit-s", type=float, default=240, help="of a case")
    found.add_argument("--stop-s", type=float, default=900, help="of everything")
    found.add_argument("--only", default="*", help="cases, such as 'ddp bloom *'")
    found.add_argument("--resume", action="store_true", help="keep the rows that passed")
    found.add_argument("--output", type=Path, default=RESULTS)
    for hidden in ("--kind", "--folder"):
        found.add_argument(hidden, help=argparse.SUPPRESS)
    found.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return found


def cases(options: argparse.Namespace) -> dict[str, list[str]]:
    """Way, model and dtype of every case, by the kind of its processes; what matters most first."""
    dtypes = ("float32",) if options.device == "cpu" else ("float32", "bfloat16")
    served = [f"{way} {m} {d}" for d in dtypes for m in ("swin", "bloom") for way in SERVED]
    offline = [f"{job} float32" for job in OFFLINE]
    alone = ("offload",) if options.device == SHARED_CARD else ("device_map", "offload")
    layers = [f"{way} {m} {d}" for way in alone for d in dtypes for m in ("swin", "bloom")]
    planned = [f"{case} float32" for case in PLANNED]
    trained = [f"{way} {m} {d}" for d in dtypes for m in ("swin", "bloom") for way in TRAINED]
    pair = [*served[:6], *planned, *offline, *served[6:]]
    every = {"pair": pair, "training": trained, "alone": layers}
    return {
        kind: [case for case in some if fnmatch.fnmatch(case, options.only)]
        for kind, some in every.items()
    }


def run(case: str, options: argparse.Namespace, place: torch.device, rank: int) -> dict[str, Any]:
    """One case, in one of its processes."""
    from two_gpus.offline import shared_out
    from two_gpus.serving import offloaded, over_layers, planned, served
    from two_gpus.training import trained

    way = case.split()[0]
    ways = {"device_map": over_layers, "offload": offloaded, "plan": planned}
    ways |= dict.fromkeys(SERVED, served) | dict.fromkeys(TRAINED, trained)
    chosen = ways.get(way, shared_out)
    found: dict[str, Any] = chosen(case, options, place, rank)
    return found


def run_all(
    kind: str,
    count: int,
    todo: list[str],
    options: argparse.Namespace,
    ends: float,
    emit: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run cases in `count` processes, and in new ones after each that ended them."""
    left = list(todo)
    while left:
        if time.monotonic() > ends:
            for case in left:
                emit(case, {"status": "skipped", "reason": f"{options.stop_s:g} s are over"})
            return
        with Watched(SCRIPT, kind, count, left, options) as watched:
            found = watched.start(ends)
            if found is not None:
                for case in left:
                    emit(case, found)
                return
            while left and watched.usable and time.monotonic() <= ends:
                found = watched.next(options.limit_s, ends)
                emit(left.pop(0), found)


def described(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """The columns that say what a row is about."""
    way, model, dtype = case.split()
    name = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    name += ", shared" if options.device == SHARED_CARD else ""
    return {
        "way": way, "model": model, "dtype": dtype, "size": options.size,
        "backend": options.backend, "device": name, "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

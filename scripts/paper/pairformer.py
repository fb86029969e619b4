"""Time one Pairformer block, component by component, with each way to attend.

python scripts/paper/pairformer.py [--device cuda] [--output DIR] [--stop-s 450] [--resume]

The sizes of the FlashBias paper: 128 pair channels, 4 heads of 32, N = 256 to 2,048 tokens;
inference, and training on a crop of 384. Weights are random; the pair representation is made of
distances along a random chain, so that its biases are smooth in parts, as in a protein, but ranks
and errors of factors say nothing about trained weights.

Parts: `core` is triangle attention on ready q, k, v, bias, padding mask (a sixteenth of the keys)
and gate; `inference` and `training` are the parts of the block, and the block; `diffusion` is a
step of five samples of one structure, 16 heads of 48, whose bias stays for 200 steps.

Ways: `library` makes the scores as OpenFold's classes do, in chunks of rows; `boltz` is Boltz's own
class with the same weights, as its users run it, and `boltz, its kernels` the same with those of
cuEquivariance (where they can be imported); SDPA, FlexAttention and cuEquivariance get the dense
bias; `ours, dense` is exact, gate fused, its bias projected by a
kernel as in converted sites; `ours, factors kept` has factors once per structure and
projects no bias; `ours, SVD in each call` makes them anew; `ours, networks` has factor networks,
fitted in closed form (random hidden layers, least squares and an SVD for the last) to four other
structures of random chains.

Errors are relative (Frobenius), of some rows of a part's output (of the core's: some queries),
against float64, beside what the plain formula loses in the same dtype (library_error); so are
gradients of the inputs and, where the way has one, of the projection of the bias. replay_ms,
of inference, is time on the card without Python between kernels (CUDA graphs), where a way can be
recorded. once_ms is what is made once per structure, and steps_200_ms what it and 200 steps take.
Up to which rank factors are faster than the kept bias is printed, and from how many steps on. In
the diffusion, `ours, chosen for 200 steps` has what `factors_once` chooses; the column chosen says
what and why, and beside factors of a rank whether they pay by the tables of costs and times.

Writes pairformer.csv, row by row, and pairformer.png. What fails or takes longer than --limit-s is
a row with its reason; after --stop-s no row is begun; --resume keeps the rows of the file and adds
those that it lacks. --parts, --sizes and --ways choose. Processes, --together of them, compile
beside each other and are measured one by one."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pairformer_core import Core, core
from pairformer_figure import draw, told
from pairformer_parts import Block, diffusion, inference, training
from pairformer_table import Broken, Stopped, Table, WarmUp
from pairformer_ways import HIDDEN

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turns import Wait, in_turns

ROOT = Path(__file__).resolve().parents[2]
#: the lengths that matter most come first
SIZES, RANKS, CROP, DIFFUSION = (1218, 384, 768, 256, 2048), (16, 32, 64, 96), 384, 768
NETWORK_RANKS, STEP_RANKS = (32, 96), (8, 16, 32, 48, 64, 96, 128)
PARTS = ("core", "inference", "training", "diffusion")
#: pair channels, heads, single channels, heads; and those of --tiny
PAPER, TINY = (128, 4, 384, 16), (16, 2, 32, 2)
#: a process that broke its context is started again so often
ROUNDS = 4

#: a part and a length
Job = tuple[str, int]


def jobs(args: argparse.Namespace) -> list[Job]:
    """In the order in which they are measured: what matters most first."""
    crop, steps_at = (12, 12) if args.tiny else (CROP, DIFFUSION)
    sizes = (12, 17) if args.tiny else args.sizes
    found = [("core", n) for n in sizes[:2]] + [("inference", n) for n in sizes[:1]]
    found += [("training", crop), ("diffusion", steps_at)]
    found += [("inference", n) for n in sizes[1:2]]
    found += [(part, n) for n in sizes[2:] for part in ("core", "inference")]
    return [job for job in found if job[0] in args.parts]


def measure(job: Job, args: argparse.Namespace, table: Table, kept: dict[Any, Any]) -> None:
    """All rows of a job; `kept` holds what the same job made before.

    Raises:
        Stopped: after --stop-s.
        Broken: the card's context is lost.
    """
    part, n = job
    dtype, sizes = getattr(torch, args.dtype), TINY if args.tiny else PAPER
    ranks, networks, steps = args.ranks, args.network_ranks, args.step_ranks
    if args.tiny:
        ranks, networks, steps = (2,), (2,), (2, 4)
    compiles = not args.no_compile
    if part == "core":
        made = kept.get(job) or Core(n, sizes[1], sizes[0] // sizes[1], args.device, dtype,
                                     compiles)  # fmt: skip
        kept[job] = made
        return core(table, made)
    hidden = 16 if args.tiny else HIDDEN
    block = kept.get(job) or Block(n, sizes, args.device, dtype, compiles, hidden)
    kept[job] = block
    if part == "diffusion":
        diffusion(table, block, steps)
    elif part == "training":
        training(table, block, networks)
    else:
        inference(table, block, ranks, networks)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Of tables."""
    return {
        "repeats": 1 if args.tiny else args.repeats, "limit_s": args.limit_s, "ends": args.ends,
        "ways": args.ways,
    }  # fmt: skip


def run_job(job: Job, args: argparse.Namespace, wait: Wait) -> None:
    """One job in a process of its own: it gets ready, waits for its turn and measures."""
    path, dtype, kept = args.output / "pairformer.csv", getattr(torch, args.dtype), {}
    with contextlib.suppress(Stopped):
        measure(job, args, WarmUp(path, args.device, dtype, **options(args)), kept)
    wait()
    try:
        measure(job, args, Table(path, args.device, dtype, resume=True, **options(args)), kept)
    except Stopped as why:
        print(why, flush=True)
    except Broken:
        sys.exit(1)


def run_all(args: argparse.Namespace) -> None:
    """All jobs, some beside each other."""
    path, dtype = args.output / "pairformer.csv", getattr(torch, args.dtype)
    table = Table(path, args.device, dtype, resume=args.resume, **options(args))
    left = jobs(args)
    if args.together < 2:
        try:
            for job in left:
                torch.compiler.reset()  # shapes add up, and past a limit nothing is compiled
                measure(job, args, table, {})
        except (Stopped, Broken) as why:
            print(why)
        return
    for at in range(0, len(left), args.together):
        some = [(job, args) for job in left[at : at + args.together]]
        for _ in range(ROUNDS):
            if not some or time.monotonic() > args.ends:
                break
            some = in_turns(run_job, some)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--network-ranks", type=int, nargs="*", default=NETWORK_RANKS)
    parser.add_argument("--step-ranks", type=int, nargs="*", default=STEP_RANKS,
                        help="of the diffusion")  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", default=["*"], metavar="PATTERN",
                        help="only these, e.g. 'ours, dense' 'SDPA*'")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for a row; 0: none")
    parser.add_argument("--stop-s", type=float, default=0.0, help="begin no row after; 0: none")
    parser.add_argument("--together", type=int, default=6 if cuda else 1,
                        help="jobs that get ready at a time")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    parser.add_argument("--no-compile", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--tiny", action="store_true", help="a block that a CPU runs in seconds")
    args = parser.parse_args()
    args.ends = time.monotonic() + args.stop_s if args.stop_s else math.inf
    return args


def main() -> None:
    """Print and write a row per size, component and way, and draw."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    run_all(args)
    path, dtype = args.output / "pairformer.csv", getattr(torch, args.dtype)
    table = Table(path, args.device, dtype, resume=True)
    for sentence in told(table):
        print(sentence)
    if table.rows:
        draw(table.rows, args.output / "pairformer.png")


if __name__ == "__main__":
    main()

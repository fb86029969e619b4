"""Time forward plus backward of our operator beside its peers, in one run on one card.

python scripts/bench_backward.py [--shapes NAME ...] [--bias frozen trained] [--stop-s S] [--resume]
python scripts/bench_backward.py --tiny --device cpu --dtype float16 --together 2

Shapes and peers are those of `bench_attention.py` (decoding aside, which nobody trains): torch SDPA
without a bias (flash, cuDNN) and with the dense bias (memory-efficient, cuDNN), FlexAttention with
the dense bias and with closed forms, packages that are installed, our sdpa path, and ours with
atomics (`deterministic=False`), which are not the `ours` of ratios. A `frozen` bias
has no gradient; a `trained` one is trained in the form that a peer takes: the dense matrix by those
that read one, the tensors of the terms by all others.

`step_ms` is forward plus backward on the card alone (CUDA graph replays), `call_ms` of eager calls,
Python included, `forward_ms` and `forward_call_ms` the forward pass of training. `peak_mib` is what
a step allocates beyond its inputs, `held_mib` what a peer keeps between steps. Gradients of q, k
and v are compared with float64 in the first batch entry and head, all queries and keys; a peer that
is off by more than `WRONG` is marked, and no ratio is made with it. Shapes get ready (compile, and
are compared) beside each other, each in a process, and are timed one after the other; a process
that dies costs one row, and the others of its shape are measured again. Writes a table and, with
`backward_figure.py`, ratios as markdown and a picture.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import row_file
import torch
from attention_shapes import SHAPES, Shape, tiny
from backward_figure import draw
from backward_step import MakeStep, Problem, Step, errors, steps, times, truth
from failures import LACKED, is_lost, lacked_beside_others
from optional_peers import NOT_INSTALLED, NotInstalled, is_stale
from turns import Wait, in_turns

from flashbias_convert.benchmark.timing import allocated

ROOT = Path(__file__).resolve().parent.parent
#: Relative error from which on gradients are wrong: rounding to bf16 gives 2e-3 to 1e-2.
WRONG = 0.03
OUT_OF_MEMORY, CRASHED = "out of memory", "crashed"
#: Scores of a shape from which on it has the card to itself.
LARGE = 2**31
FIELDS = (
    "shape", "bias", "peer", "has_bias", "step_ms", "p20_ms", "p80_ms", "call_ms", "forward_ms",
    "forward_call_ms", "peak_mib", "held_mib", "error_dq", "error_dk", "error_dv", "state", "note",
    "card", "torch", "triton",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        shape, bias: name of the shape; "frozen" or "trained".
        peers: only these; None means all that have no row yet.
        alone: nothing else is on the card.
        before: how many peers had no row when it began, if it is not the first try.
        options: of the run.
    """

    shape: str
    bias: str
    options: argparse.Namespace
    peers: tuple[str, ...] | None = None
    alone: bool = False
    before: int | None = None


def shape_of(name: str, small: bool) -> Shape:
    """A shape, or its like of a size for a CPU."""
    return tiny(SHAPES[name]) if small else SHAPES[name]


def known_peers(output: Path, shape: str, bias: str) -> set[str]:
    """The peers that have a row."""
    rows = row_file.read(output)
    return {r["peer"] for r in rows if (r["shape"], r["bias"]) == (shape, bias)}


def write(job: Job, row: dict[str, Any]) -> None:
    """Add a row to the table and print it."""
    device = torch.device(job.options.device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    row = {"shape": job.shape, "bias": job.bias, **row, "card": card, "torch": torch.__version__}
    row["triton"] = _triton()
    row_file.append(job.options.output, FIELDS, row)
    shown = [row.get(x, "-") for x in ("step_ms", "call_ms", "forward_ms", "peak_mib", "error_dq")]
    print(f"{job.shape:30s} {job.bias:8s} {row['peer']:20s}", *shown, row["state"], flush=True)


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def bench_job(job: Job, wait: Wait) -> None:
    """Measure the peers of a job.

    The process ends badly after an illegal access, which is the row of its peer, and where memory
    lacked beside other jobs: those without a row are measured again.
    """
    options = job.options
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    shape = shape_of(job.shape, options.tiny)
    problem = Problem.of(shape, job.bias == "trained", dtype, device)
    left = left_of(job)
    exact: dict[bool, Any] = {}
    found = []
    for peer, make in steps(problem, tuned=options.tuned):
        if peer.name not in left:
            continue
        if peer.has_bias not in exact:
            exact[peer.has_bias] = truth(problem, peer.has_bias)
        row = {"peer": peer.name, "has_bias": int(peer.has_bias or problem.bias is None)}
        told, step = ready(make, exact[peer.has_bias], device)
        if told["state"] == CRASHED:
            write(job, row | told)
            raise SystemExit(1)
        found.append((row | told, step))
    exact.clear()
    _settle(device)
    wait()
    lacked = False
    for row, step in found:
        told = _timed(row, step, options.repeats, device)
        if told["state"] in (OUT_OF_MEMORY, LACKED) and not job.alone:
            lacked = True
        elif told["state"] == LACKED:  # what other commands hold is not gone in this run
            print(f"{job.shape}, {job.bias}, {told['peer']}: no row, {LACKED}", flush=True)
        else:
            write(job, told)
        if told["state"] == CRASHED:
            raise SystemExit(1)
    if lacked:
        raise SystemExit(1)


def ready(make: MakeStep, exact: Any, device: torch.device) -> tuple[dict[str, Any], Step | None]:
    """What is known about a peer before the clock runs, and its step; None if it fails."""
    before = allocated(device)
    try:
        step = make()
        wrong = errors(step(), exact)
        fine = all(x < WRONG for x in wrong.values())
        told = {name: f"{x:.1e}" for name, x in wrong.items()}
        told |= {"state": "ok" if fine else "wrong"}
        return told | {"held_mib": f"{(allocated(device) - before) / 2**20:.1f}"}, step
    except NotInstalled as problem:
        return {"state": NOT_INSTALLED, "note": str(problem)}, None
    except Exception as problem:  # a peer that fails is a row, not the end of the run
        return {"state": _state(problem)}, None


def _timed(
    row: dict[str, Any], step: Step | None, repeats: int, device: torch.device
) -> dict[str, Any]:
    if step is None:
        return row
    try:
        return row | times(step, repeats, device)
    except Exception as problem:
        return row | {"state": _state(problem)}
    finally:
        _settle(device)


def _state(problem: Exception) -> str:
    if lacked_beside_others(problem):
        return LACKED
    if isinstance(problem, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    # an illegal memory access, also where a compiler wraps it: what follows fails in its stead
    if type(problem).__name__ == "AcceleratorError" or is_lost(problem):
        return CRASHED
    lines = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"[:90]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as problem:  # the card is lost to this process; the next call says so
            print(f"after a crash: {str(problem).splitlines()[0]}", flush=True)


def left_of(job: Job) -> list[str]:
    """The peers of a job that have no row."""
    probe = Problem.of(shape_of(job.shape, True), False, torch.float32, torch.device("cpu"))
    names = [peer.name for peer, _ in steps(probe, tuned=job.options.tuned)]
    known = known_peers(job.options.output, job.shape, job.bias)
    own = job.peers or job.options.peers or names
    return [n for n in names if n in own and n not in known]


def again(job: Job) -> list[Job]:
    """What follows a process that ended badly, alone on the card.

    Another one for what is left, if some of it was measured or its culprit is known, else one for
    each peer: one that dies without a word has crashed.
    """
    left = left_of(job)
    if job.alone and job.peers is not None and len(job.peers) == 1:
        for name in left:
            write(job, {"peer": name, "state": CRASHED})
        return []
    progress = job.before is None or len(left) < job.before
    if progress and left:
        return [replace(job, alone=True, before=len(left))]
    return [replace(job, peers=(n,), alone=True) for n in left]


def waves(jobs: list[Job], size: int) -> list[list[Job]]:
    """Jobs that get ready together: at most `size`, and large ones alone."""

    def large(job: Job) -> bool:
        shape = SHAPES[job.shape]
        scores = math.prod(shape.batch) * shape.heads * shape.n**2
        return not job.options.tiny and scores > LARGE

    small = [j for j in jobs if not j.alone and not large(j)]
    together = [small[i : i + size] for i in range(0, len(small), size)]
    return together + [[replace(j, alone=True)] for j in jobs if j.alone or large(j)]


def run(jobs: list[Job], options: argparse.Namespace) -> None:
    """Measure all jobs, and what they lost."""
    started = time.monotonic()
    queue = waves(jobs, options.together)
    while queue:
        wave = queue.pop(0)
        left = options.stop_s - (time.monotonic() - started)
        calls = [(job,) for job in wave]
        seconds = None if math.isinf(left) else left
        lost = calls if left < 0 else in_turns(bench_job, calls, seconds=seconds)
        for (job,) in lost:
            if options.stop_s < time.monotonic() - started:
                print(f"{job.shape}, {job.bias}: not measured, or not all of it")
            else:
                queue += waves(again(job), 1)


def _begin(options: argparse.Namespace) -> list[Job]:
    """The jobs of a run; begins the file."""
    rows = row_file.begin(options.output, FIELDS, resume=options.resume)
    row_file.write(options.output, FIELDS, [row for row in rows if not is_stale(row)])
    every = [Job(name, bias, options) for name in options.shapes for bias in options.bias]
    useful = [j for j in every if j.bias == "frozen" or SHAPES[j.shape].bias is not None]
    return [j for j in useful if left_of(j)]


def arguments() -> argparse.Namespace:
    """The words of a command."""
    shapes = [name for name, shape in SHAPES.items() if shape.queries is None]
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes, metavar="NAME")
    parser.add_argument("--bias", nargs="+", choices=("frozen", "trained"),
                        default=["frozen", "trained"])  # fmt: skip
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--tuned", action="store_true", help="FlexAttention tuned, too")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes")
    parser.add_argument("--repeats", type=int, default=20, help="eager calls that are timed")
    parser.add_argument("--together", type=int, default=10, help="jobs that get ready at a time")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin nothing after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_backward.csv")
    return parser.parse_args()


def main() -> None:
    """Time every peer on every shape; write tables and a picture."""
    options = arguments()
    run(_begin(options), options)
    draw(options.output)


if __name__ == "__main__":
    main()

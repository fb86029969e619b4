"""The PDE solver of the FlashBias paper: is it better with distances, and what do they cost?

python scripts/paper/pde_solver.py train MESH [--points 8192] [--steps 3000] [--device cuda]
python scripts/paper/pde_solver.py bench MESH [--points 8192 16384 32186] [--device cuda]

MESH is a mesh (``.ply`` of text, or what trimesh reads) or points, ``.npy`` (N, 3).

``train`` trains the paper's solver (8 layers, 128 channels, 8 heads) twice, with weighted distances
in its attention and without, on fields that are known at one in ten points (`pde_task.py`), and
measures both on points and fields that neither has seen: pde_solver.csv and pde_solver.png.

``bench`` times a whole training step (Adam, batch 1, bf16 autocast) and inference, with its memory,
weights and optimizer included, beside other ways to compute the same attention:
pde_solver_speed.csv. A peer that runs out of memory says so. `error_out`, `error_dq` and `error_dw`
are relative errors of one attention call and its gradients at no more than 2,048 points against
float64; `correct` says whether none is more than twice that of the formula in the same dtype, or
than what fp32 leaves of a bias of this size.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pde_peers import LARGEST_WEIGHT, NO_BIAS, OURS, PEERS, errors, plain
from pde_task import Source, Task, surface_points
from torch import Tensor, nn

from flashbias_convert.benchmark.timing import measure
from flashbias_convert.models.pde_transformer import (
    Attend,
    FusedAttend,
    PDEConfig,
    PDETransformer,
    relative_error,
)

ROOT = Path(__file__).resolve().parents[2]
#: points that training and tests draw from, as a multiple of those of a field
POOL = 4
TRAINED = ("model", "points", "error", "error_std", "best_field", "worst_field", "steps", "batch",
           "parameters", "seconds", "peak_mib", "layers", "lr", "wavenumber", "known", "fields",
           "seed", "backend", "dtype", "device", "torch")  # fmt: skip
TIMED = ("phase", "peer", "points", "median_ms", "p20_ms", "p80_ms", "peak_mib", "s_per_100",
         "status", "error_out", "error_dq", "error_dw", "correct", "repeats", "first_call_s",
         "layers", "dtype", "device", "torch")  # fmt: skip


def device_name(device: torch.device) -> str:
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"


def model_of(args: argparse.Namespace, attend: Attend, distance: bool) -> PDETransformer:
    torch.manual_seed(args.seed)
    config = PDEConfig(inputs=2, layers=args.layers, distance=distance)
    return PDETransformer(config, attend).to(args.device)


def autocast(args: argparse.Namespace) -> Any:
    dtype = getattr(torch, args.dtype)
    half = dtype != torch.float32
    return torch.autocast(torch.device(args.device).type, dtype if half else None, enabled=half)


# -- training ------------------------------------------------------------------------------


def train(
    model: nn.Module, source: Source, unseen: Source, args: argparse.Namespace
) -> tuple[list[tuple[int, float]], float]:
    """(step, error on unseen fields) now and then, and the seconds of training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=args.device != "cpu")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    curve, seconds, started = [], 0.0, time.perf_counter()
    for step in range(args.steps):
        points, inputs, field = source.next(args.batch)
        with autocast(args):
            found = model(points, inputs)
        loss = relative_error(found, field).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % args.check_every == 0 or step + 1 == args.steps:
            if not bool(loss.isfinite()):
                raise SystemExit(f"the loss is {float(loss)} at step {step + 1}")
            seconds += time.perf_counter() - started
            curve.append((step + 1, float(test(model, unseen, args, few=4).mean())))
            print(f"step {step + 1}  error {curve[-1][1]:.4f}  {seconds:.0f} s", flush=True)
            started = time.perf_counter()
    return curve, seconds


@torch.no_grad()
def test(model: nn.Module, unseen: Source, args: argparse.Namespace, few: int = 0) -> Tensor:
    """Errors of fields that were not trained on; the same fields in every call."""
    unseen.generator.manual_seed(args.seed + 1)
    found = []
    for _ in range(few or args.fields):
        points, inputs, field = unseen.next(1)
        with autocast(args):
            found.append(relative_error(model(points, inputs), field))
    return torch.cat(found)


def trained(args: argparse.Namespace) -> None:
    """Train both, write the table and the picture."""
    device, (points, *_) = torch.device(args.device), args.points
    task = Task(args.wavenumber, known=args.known)
    pool = surface_points(args.mesh, 2 * args.pool * points, args.seed).to(device)
    curves, pictures = {}, {}
    with (args.output / "pde_solver.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TRAINED)
        for name, distance in (("with distances", True), ("without", False)):
            source = Source(pool[: len(pool) // 2], points, task, args.seed)
            unseen = Source(pool[len(pool) // 2 :], points, task, args.seed + 1)
            model = model_of(args, FusedAttend(args.backend), distance)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            curves[name], seconds = train(model, source, unseen, args)
            peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else ""
            found = test(model, unseen, args)
            pictures[name] = example(model, unseen, args)
            spread = float(found.std()) if len(found) > 1 else 0.0
            row = [name, points, f"{found.mean():.5f}", f"{spread:.5f}", f"{found.min():.5f}",
                   f"{found.max():.5f}", args.steps, args.batch,
                   sum(p.numel() for p in model.parameters()), f"{seconds:.1f}", peak, args.layers,
                   args.lr, args.wavenumber, args.known, args.fields, args.seed, args.backend,
                   args.dtype, device_name(device), torch.__version__]  # fmt: skip
            writer.writerow(row)
            file.flush()
            print(*row, flush=True)
    draw(curves, pictures, args.output / "pde_solver.png", f"{points} points, {args.steps} steps")


@torch.no_grad()
def example(
    model: nn.Module, unseen: Source, args: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor]:
    """Points, the true field and the one that was found."""
    unseen.generator.manual_seed(args.seed + 1)
    points, inputs, field = unseen.next(1)
    with autocast(args):
        found = model(points, inputs).float()
    return points[0].cpu(), field[0, :, 0].cpu(), found[0, :, 0].cpu()


def draw(curves: Any, pictures: Any, path: Path, note: str) -> None:
    """Errors by step, a true field, and what is wrong with both models' answers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(17, 4.2), layout="constrained")
    for name, curve in curves.items():
        axes[0].semilogy(*zip(*curve, strict=True), marker=".", label=name)
    axes[0].set(xlabel="step", ylabel="relative error of unseen fields", title=note)
    axes[0].legend()
    points, truth, _ = next(iter(pictures.values()))
    front = points[:, 2].argsort()
    edge = float(truth.abs().max())
    panels = [("true field", truth)]
    panels += [(f"error {name}", found - truth) for name, (_, _, found) in pictures.items()]
    for axis, (title, values) in zip(axes[1:], panels, strict=True):
        shown = axis.scatter(points[front, 0], points[front, 1], c=values[front], s=2,
                             cmap="RdBu_r", vmin=-edge, vmax=edge)  # fmt: skip
        axis.set(title=title, xticks=[], yticks=[], aspect="equal")
        figure.colorbar(shown, ax=axis, fraction=0.046)
    figure.savefig(path, dpi=100)


# -- speed ---------------------------------------------------------------------------------


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


def timed_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device(args.device)
    pool = surface_points(args.mesh, max(args.points), args.seed).to(device)
    for points in args.points:
        batch = Source(pool, points, Task(), args.seed).next(1)
        for peer in args.peers:
            facts = {"peer": peer, "points": points}
            try:
                yield from _timed(peer, batch, facts, args)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                yield {**facts, "status": _status(error)}
            gc.collect()
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _status(error: Exception) -> str:
    """Why there is no time."""
    out = isinstance(error, torch.OutOfMemoryError)
    return "out of memory" if out else (str(error).splitlines() or [type(error).__name__])[0][:120]


def _timed(
    peer: str, batch: tuple[Tensor, Tensor, Tensor], facts: dict[str, Any], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    attend = PEERS[peer]() if peer != OURS else FusedAttend(args.backend)
    wrong, correct = ({}, {}) if peer == NO_BIAS else judged(attend, batch[0][0], args)
    model = model_of(args, attend, peer != NO_BIAS)
    for phase, call in phases(model, batch, args).items():
        row = {"phase": phase, **facts, **wrong, "correct": correct.get(phase, "no bias")}
        try:
            found = measure(call, torch.device(args.device), repeats=args.repeats, budget_s=60)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            yield {**row, "status": _status(error)}
            model.zero_grad(set_to_none=True)
            continue
        times = found.times
        yield {
            **row, "median_ms": f"{times.median_ms:.3f}", "p20_ms": f"{times.p20_ms:.3f}",
            "p80_ms": f"{times.p80_ms:.3f}", "s_per_100": f"{times.median_ms / 10:.3f}",
            "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
            "repeats": times.repeats, "first_call_s": f"{found.first_call_s:.1f}", "status": "ok",
        }  # fmt: skip
        model.zero_grad(set_to_none=True)


def timed(args: argparse.Namespace) -> None:
    """Write a row per phase, peer and number of points."""
    with (args.output / "pde_solver_speed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TIMED)
        writer.writeheader()
        for row in timed_rows(args):
            machine = {"layers": args.layers, "dtype": args.dtype, "torch": torch.__version__,
                       "device": device_name(torch.device(args.device))}  # fmt: skip
            writer.writerow({**row, **machine})
            file.flush()
            print(row, flush=True)


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "bench"))
    parser.add_argument("mesh", type=Path)
    parser.add_argument("--points", type=int, nargs="+", help="(train: 8192)")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check-every", type=int, default=250)
    parser.add_argument("--fields", type=int, default=32, help="unseen fields of the table")
    parser.add_argument("--pool", type=int, default=POOL, help="points to draw from, per point")
    parser.add_argument("--wavenumber", type=float, default=Task.wavenumber)
    parser.add_argument("--known", type=float, default=Task.known)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results")
    args = parser.parse_args()
    args.points = args.points or ([8192] if args.what == "train" else [8192, 16384, 32186])
    return args


def main() -> None:
    """Train, or measure."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    (trained if args.what == "train" else timed)(args)


if __name__ == "__main__":
    main()

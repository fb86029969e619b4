"""Training of the PDE solver with distances in its attention and without."""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import torch
from pde_task import Source, Task, surface_points
from torch import Tensor, nn

from flashbias_convert.models.pde_transformer import (
    Attend,
    FusedAttend,
    PDEConfig,
    PDETransformer,
    relative_error,
)

TRAINED = ("model", "points", "error", "error_std", "best_field", "worst_field", "steps", "batch",
           "parameters", "seconds", "peak_mib", "layers", "lr", "wavenumber", "known", "fields",
           "seed", "surface", "backend", "dtype", "device", "torch")  # fmt: skip
WITH, WITHOUT = "with distances", "without"
#: share of the steps, or of the time, in which the learning rate grows
WARM = 0.1
#: relative errors without and with distances in the paper (cars, its table of PDE solving)
PAPER = (0.0838, 0.0706)


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


def train(
    model: nn.Module,
    source: Source,
    unseen: Source,
    args: argparse.Namespace,
    steps: int,
    limit_s: float,
) -> tuple[list[tuple[int, float]], float]:
    """(step, error on unseen fields) now and then, and the seconds of training without tests.

    Args:
        model: to train.
        source, unseen: fields to learn, and others.
        args: of the run.
        steps: after so many it ends.
        limit_s: after so many seconds, tests included, it ends, too; the learning rate falls with
            whichever is nearer.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=args.device != "cpu")
    curve, seconds, begun = [], 0.0, time.perf_counter()
    started, step, done = begun, 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(done)
        points, inputs, field = source.next(args.batch)
        with autocast(args):
            found = model(points, inputs)
        loss = relative_error(found, field).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        done = max(step / steps, (time.perf_counter() - begun) / limit_s)
        if step % args.check_every == 0 or done >= 1:
            if not bool(loss.isfinite()):
                raise SystemExit(f"the loss is {float(loss)} at step {step}")
            seconds += time.perf_counter() - started
            curve.append((step, float(test(model, unseen, args, few=4).mean())))
            print(f"step {step}  error {curve[-1][1]:.4f}  {seconds:.0f} s", flush=True)
            started = time.perf_counter()
    return curve, seconds


def rate(done: float) -> float:
    """Share of the largest learning rate: up in a line, down in half a cosine."""
    if done < WARM:
        return (done + 0.01) / (WARM + 0.01)
    return 0.5 + 0.5 * math.cos(math.pi * (done - WARM) / (1 - WARM))


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
    """Train both, as many steps each; write the tables and the picture."""
    device, (points, *_) = torch.device(args.device), args.points
    task = Task(args.wavenumber, known=args.known)
    pool = surface_points(args.mesh, 2 * args.pool * points, args.seed).to(device)
    curves, pictures, told = {}, {}, {}
    steps = args.steps
    with (args.output / "pde_solver.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TRAINED)
        writer.writeheader()
        for name in (WITH, WITHOUT):
            source = Source(pool[: len(pool) // 2], points, task, args.seed)
            unseen = Source(pool[len(pool) // 2 :], points, task, args.seed + 1)
            model = model_of(args, FusedAttend(args.backend), name == WITH)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            limit = 60 * args.minutes / 2
            curves[name], seconds = train(model, source, unseen, args, steps, limit)
            steps = curves[name][-1][0]  # the other one gets no more of them
            told[name] = test(model, unseen, args)
            pictures[name] = example(model, unseen, args)
            row = {"model": name, "steps": steps, "seconds": f"{seconds:.1f}", **_facts(args)}
            row |= _spread(told[name])
            row["parameters"] = sum(p.numel() for p in model.parameters())
            if device.type == "cuda":
                row["peak_mib"] = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"
            writer.writerow(row)
            file.flush()
            print(row, flush=True)
    words = comparison(float(told[WITH].mean()), float(told[WITHOUT].mean()), points)
    (args.output / "pde_solver.md").write_text(words)
    print(words)
    draw(curves, pictures, args.output / "pde_solver.png", f"{points} points, {steps} steps")


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    names = ("batch", "layers", "lr", "wavenumber", "known", "fields", "seed", "backend", "dtype")
    device = device_name(torch.device(args.device))
    return {name: getattr(args, name) for name in names} | {
        "points": args.points[0], "surface": Path(args.mesh).name, "device": device,
        "torch": torch.__version__,
    }  # fmt: skip


def _spread(found: Tensor) -> dict[str, str]:
    spread = found.std() if len(found) > 1 else torch.zeros(())
    numbers = (found.mean(), spread, found.min(), found.max())
    names = ("error", "error_std", "best_field", "worst_field")
    return {name: f"{x:.5f}" for name, x in zip(names, numbers, strict=True)}


def comparison(with_bias: float, without: float, points: int) -> str:
    """Markdown: both errors, and the paper's of another task beside."""
    lines = [
        f"| relative error | this task, {points:,} points | paper: pressure, 32,186 points |",
        "|---|---|---|",
        f"| without distances | {without:.4f} | {PAPER[0]} |",
        f"| with distances | {with_bias:.4f} | {PAPER[1]} |",
        f"| lower by | {1 - with_bias / without:.1%} | {1 - PAPER[1] / PAPER[0]:.1%} |",
    ]
    return "\n".join(lines) + "\n"


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

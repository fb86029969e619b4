"""Ranks by calibration against ranks by energy alone, on the SwinV2 trained on CIFAR-10.

python scripts/evaluate_calibration.py DATA_FOLDER [--limit N] [--samples N]
    [--energies E ...] [--limits X ...] [--device cuda]

Calibration sees images of the training set, accuracy is that of the test set. The cost is what the
choice of terms itself counts with (`flashbias_convert.decompose.added_cost`), averaged over all
scores of one image; it is no time. Writes evaluate_calibration.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from cifar_jpgpack import load_split, to_model_input
from evaluate_swinv2 import EXAMPLE, ROOT, Data, logits_of, ranks, score
from torch import Tensor, nn

from flashbias_convert import inspect_model
from flashbias_convert.calibration import calibrate_model
from flashbias_convert.checkpoint import open_model
from flashbias_convert.decompose import added_cost
from flashbias_convert.patching import apply_plan
from flashbias_convert.plan import Plan, SitePlan

ENERGIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999)
LIMITS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)


def cost(plan: Plan, model: nn.Module) -> float:
    """Mean cost per score of one image, weighted by the windows of each site."""
    parts = [(_site_cost(site), _scores(site, model)) for site in plan.patched]
    return sum(c * n for c, n in parts) / sum(n for _, n in parts)


def _site_cost(site: SitePlan) -> float:
    sizes = {"n": site.n, "m": site.m, "head_dim": site.head_dim}
    found = [added_cost(d.term, rank=d.rank or 0, **sizes) for d in site.decisions]
    return sum(found) / len(found)


def _scores(site: SitePlan, model: nn.Module) -> int:
    block: Any = model.get_submodule(site.name.removesuffix(".attn"))
    height, width = block.input_resolution
    return height * width * site.m * site.heads


def row(name: str, plan: Plan, original: Tensor, data: Data, batch: int, path: Path, device: str
        ) -> dict[str, Any]:  # fmt: skip
    """What a plan costs, and what it does to accuracy."""
    model = open_model(path).model.to(device).eval()
    apply_plan(model, plan)
    found = score(logits_of(model, data[0], batch), data[1], original)
    heads = [d for site in plan.patched for d in site.decisions]
    return {
        "name": name, "cost": round(cost(plan, model), 4), **found,
        "mean_rank": ranks(plan)["mean_rank"],
        "heads_without_bias": sum(d.term == "none" for d in heads),
        "heads_exact": sum(d.term not in ("none", "low_rank") for d in heads),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Top-1 and the change of logits against cost, for both ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    columns = (("top1", "top-1 (%)"), ("logit_difference", "largest change of a logit"))
    for axes, (column, title) in zip(both, columns, strict=True):
        for kind, marker, below in (("calibrated", "o", -13), ("energy", "s", 7)):
            chosen = [r for r in rows if r["name"].startswith(kind)]
            points = [(float(r["cost"]), float(r[column])) for r in chosen]
            axes.plot(*zip(*points, strict=True), marker=marker, label=kind)
            names: dict[tuple[float, float], list[str]] = {}  # of points that coincide
            for point, r in zip(points, chosen, strict=True):
                names.setdefault(point, []).append(r["name"].split()[1])
            for point, own in names.items():
                text = own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"
                axes.annotate(text, point, fontsize=7, ha="center", textcoords="offset points",
                              xytext=(0, below))  # fmt: skip
        axes.set(xlabel="cost of the bias (ps per score)", ylabel=title)
    both[0].axhline(rows[0]["top1"], color="black", linewidth=1, label="original")
    both[0].legend()
    both[1].set(yscale="log")
    figure.suptitle("Terms chosen by energy, and by calibration")
    figure.savefig(file, dpi=130)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLE)
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--energies", type=float, nargs="*", default=ENERGIES)
    parser.add_argument("--limits", type=float, nargs="*", default=LIMITS)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    args = parser.parse_args()
    images, labels = load_split(args.data, "test")
    data = images[: args.limit].to(args.device), labels[: args.limit].to(args.device)
    samples = to_model_input(load_split(args.data, "train")[0][: args.samples])
    model = open_model(args.checkpoint).model.to(args.device).eval()
    original = logits_of(model, data[0], args.batch)
    rows: list[dict[str, Any]] = [{"name": "original", **score(original, data[1], original)}]
    print(rows[0], flush=True)

    def add(name: str, plan: Plan, seconds: float) -> None:
        found = row(name, plan, original, data, args.batch, args.checkpoint, args.device)
        rows.append({**found, "plan_seconds": round(seconds, 1)})
        print(rows[-1], flush=True)

    for energy in args.energies:
        start = time.perf_counter()
        plan = inspect_model(
            model, method="svd", energy=energy, max_attention_error=1.0, force_all=True
        )
        add(f"energy {energy:g}", plan, time.perf_counter() - start)
    for limit in args.limits:
        start = time.perf_counter()
        plan = calibrate_model(model, list(samples.split(32)), max_output_error=limit)
        add(f"calibrated {limit:g}", plan, time.perf_counter() - start)
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "evaluate_calibration.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.output / "evaluate_calibration.png")


if __name__ == "__main__":
    main()

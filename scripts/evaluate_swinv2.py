"""Accuracy of the CIFAR-10 SwinV2 before and after conversion, from the converted files.

python scripts/evaluate_swinv2.py DATA_FOLDER [--limit N] [--device cuda] [--output DIR]

Every row of the table is a file that was converted, closed and loaded again, except "no bias" and
the rows named "raw", which show what happens when rows are not centred before the SVD. Writes
evaluate_swinv2.json, .csv, .md and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cifar_jpgpack import load_split, to_model_input
from torch import Tensor, nn
from train_swinv2_cifar import remove_bias

from flashbias_convert import DecomposeOptions, ScoreBias, inspect_model, load_model
from flashbias_convert.checkpoint import convert_checkpoint, open_model
from flashbias_convert.decompose import cumulative_energy, rank_for_energy, spectrum, svd_factors
from flashbias_convert.patching import apply_plan
from flashbias_convert.plan import Plan, SitePlan

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/swinv2_cifar10/model.safetensors"
ENERGIES = (0.9, 0.95, 0.99, 0.995, 0.999)
COLUMNS = (
    "name", "top1", "top5", "agreement", "logit_difference", "mean_rank", "mean_rank_256",
    "max_rank", "terms", "file_mb", "seconds",
)  # fmt: skip
Data = tuple[Tensor, Tensor]


@torch.inference_mode()
def logits_of(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    """Logits (n, classes) of images (n, 3, 32, 32), in the dtype of the model, as float64."""
    dtype = next(model.parameters()).dtype
    parts = [model(to_model_input(some).to(dtype)) for some in images.split(batch)]
    return torch.cat(parts).double()


def score(logits: Tensor, labels: Tensor, original: Tensor) -> dict[str, float]:
    """Top-1 and top-5 in percent, and how the logits compare with the original's."""
    ranked = logits.topk(5, dim=1).indices == labels[:, None]
    return {
        "top1": round(100 * ranked[:, 0].double().mean().item(), 2),
        "top5": round(100 * ranked.any(1).double().mean().item(), 2),
        "agreement": round(
            100 * (logits.argmax(1) == original.argmax(1)).double().mean().item(), 2
        ),
        "logit_difference": float(f"{(logits - original).abs().max().item():.3g}"),
    }


def ranks(plan: Plan) -> dict[str, Any]:
    """Ranks over the heads of all sites, and of the sites with windows of 256 tokens."""
    every = [r for site in plan.patched for r in site.ranks()]
    wide = [r for site in plan.patched if site.n == 256 for r in site.ranks()]
    kinds = sorted({d.term for site in plan.patched for d in site.decisions})
    return {
        "mean_rank": round(sum(every) / len(every), 1) if every else None,
        "mean_rank_256": round(sum(wide) / len(wide), 1) if wide else None,
        "max_rank": max(every, default=None),
        "terms": "+".join(kinds),
    }


def settings() -> Iterator[tuple[str, DecomposeOptions]]:
    """Names and options of the conversions."""
    yield "exact", DecomposeOptions(method="exact")
    yield "auto 0.99", DecomposeOptions(method="auto", energy=0.99)
    for fill in (True, False):
        for energy in ENERGIES:
            options = DecomposeOptions(
                method="svd", energy=energy, max_attention_error=1.0, fill=fill
            )
            yield f"svd {energy:g}" + ("" if fill else " --no-fill"), options


def converted_row(
    name: str, options: DecomposeOptions, original: Tensor, data: Data, args: argparse.Namespace
) -> dict[str, Any]:
    """Convert, load the file again, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.flashbias.safetensors"
        start = time.perf_counter()
        plan = convert_checkpoint(args.checkpoint, file, options=options, device=args.device).plan
        seconds = time.perf_counter() - start
        size = file.stat().st_size
        model = load_model(file, device=args.device)
    found = score(logits_of(model, data[0], args.batch), data[1], original)
    return {
        "name": name, **found, **ranks(plan),
        "file_mb": round(size / 1e6, 2), "seconds": round(seconds, 2),
    }  # fmt: skip


def raw_row(
    energy: float, original: Tensor, data: Data, args: argparse.Namespace
) -> dict[str, Any]:
    """The same truncation without centring rows: what the plain energy rule does."""
    model = open_model(args.checkpoint).model.to(args.device)
    plan = inspect_model(model, method="exact")
    for site in plan.patched:
        site.bias = raw_terms(site, energy)
        site.spec = site.bias.spec()
    apply_plan(model, plan)
    model.eval()
    found = score(logits_of(model, data[0], args.batch), data[1], original)
    every = [r for s in plan.patched for t in s.bias.terms if t.kind == "low_rank"
             for r in t.head_ranks()]  # fmt: skip
    return {"name": f"raw svd {energy:g}", **found, "mean_rank": round(sum(every) / len(every), 1)}


def raw_terms(site: SitePlan, energy: float) -> ScoreBias:
    """The site's masks, and its bias cut at an energy that counts the row means, too."""
    assert site.bias is not None
    masks = tuple(t for t in site.bias.terms if t.kind == "regions")
    rest = ScoreBias(tuple(t for t in site.bias.terms if t.kind != "regions"), site.heads)
    factors = svd_factors(rest.dense(site.n, site.m), energy=energy, centre=False)
    return ScoreBias((factors, *masks), site.heads)


def rounding_rows(data: Data, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Exact conversion against float64, beside the original's own error in the same dtype."""
    images = data[0][: args.rounding_images]
    truth_model = open_model(args.checkpoint).model.double().to(args.device).eval()
    truth = logits_of(truth_model, images, args.batch)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exact.safetensors"
        options = DecomposeOptions(method="exact")
        convert_checkpoint(args.checkpoint, file, options=options, device=args.device)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            plain = open_model(args.checkpoint).model.to(args.device, dtype).eval()
            exact = load_model(file, device=args.device, dtype=dtype)
            own, ours = (logits_of(m, images, args.batch) - truth for m in (plain, exact))
            rows.append({
                "dtype": str(dtype).removeprefix("torch."),
                "original_max": float(f"{own.abs().max():.3g}"),
                "converted_max": float(f"{ours.abs().max():.3g}"),
                "original_rms": float(f"{own.square().mean().sqrt():.3g}"),
                "converted_rms": float(f"{ours.square().mean().sqrt():.3g}"),
            })  # fmt: skip
    return rows


def spectra(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Per site: SVD time and ranks for 95 and 99 % energy, row-centred and raw."""
    model = open_model(args.checkpoint).model.to(args.device)
    rows = []
    for site in inspect_model(model, method="exact").patched:
        assert site.bias is not None
        terms = tuple(t for t in site.bias.terms if t.kind != "regions")
        bias = ScoreBias(terms, site.heads).dense(site.n, site.m)
        start = time.perf_counter()
        centred = spectrum(bias).cpu()
        seconds = time.perf_counter() - start
        raw = spectrum(bias, centre=False).cpu()
        row: dict[str, Any] = {"site": site.name, "n": site.n, "svd_seconds": round(seconds, 4)}
        for label, values in (("centred", centred), ("raw", raw)):
            for energy in (0.95, 0.99):
                found = rank_for_energy(values, energy)
                row[f"rank_{label}_{energy:g}"] = [int(r) for r in found]
        row["energy_centred"] = [
            [round(float(e), 5) for e in head[:48]] for head in cumulative_energy(centred)
        ]
        rows.append(row)
    return rows


def draw(result: dict[str, Any], file: Path) -> None:
    """Top-1 against mean rank, and the rank for 95 and 99 % energy of each layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = {row["name"]: row for row in result["rows"]}
    curves = (
        ("row-centred energy", "svd {:g} --no-fill", "o", 6),
        ("row-centred, filled", "svd {:g}", "^", None),
        ("raw energy", "raw svd {:g}", "s", -13),
    )
    for label, pattern, marker, above in curves:
        chosen = [(e, rows[pattern.format(e)]) for e in ENERGIES if pattern.format(e) in rows]
        if not chosen:
            continue
        mean_ranks, top1 = zip(*((r["mean_rank"], r["top1"]) for _, r in chosen), strict=True)
        left.plot(mean_ranks, top1, marker=marker, label=label)
        if above is None:  # these points lie close together
            continue
        for (energy, _), x, y in zip(chosen, mean_ranks, top1, strict=True):
            left.annotate(f"{energy:g}", (x, y), fontsize=8, ha="center",
                          textcoords="offset points", xytext=(0, above))  # fmt: skip
    left.axhline(rows["original"]["top1"], color="black", linewidth=1, label="original")
    left.axhline(rows["no bias"]["top1"], color="gray", linestyle=":", label="no bias")
    left.set(xlabel="mean rank over all heads", ylabel="top-1 (%)", title="Accuracy by rank")
    left.legend()
    names = [s["site"].removeprefix("layers.").replace(".blocks.", ".").removesuffix(".attn")
             for s in result["sites"]]  # fmt: skip
    at = range(len(names))
    for offset, energy in ((-0.2, 0.95), (0.2, 0.99)):
        values = [s[f"rank_centred_{energy:g}"] for s in result["sites"]]
        right.bar([i + offset for i in at], [sum(v) / len(v) for v in values], 0.38,
                  label=f"{100 * energy:g} % energy")  # fmt: skip
        right.scatter([i + offset for i, v in zip(at, values, strict=True) for _ in v],
                      [r for v in values for r in v], color="black", s=8, zorder=3)  # fmt: skip
    right.set_xticks(list(at), [f"{n}\nN={s['n']}" for n, s in
                                zip(names, result["sites"], strict=True)], fontsize=8)  # fmt: skip
    right.set(xlabel="layer.block", ylabel="rank (bar: mean, dots: heads)", title="Rank by layer")
    right.legend()
    figure.savefig(file, dpi=130)


def markdown(result: dict[str, Any]) -> str:
    """The table of the README."""
    lines = [
        "| conversion | top-1 | top-5 | same class | largest logit difference | mean rank "
        "(N = 256) | terms | file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        mean = "" if row.get("mean_rank") is None else f"{row['mean_rank']}"
        mean += "" if row.get("mean_rank_256") is None else f" ({row['mean_rank_256']})"
        size = f"{row['file_mb']} MB" if "file_mb" in row else ""
        lines.append(
            f"| {row['name']} | {row['top1']:.2f} | {row['top5']:.2f} | {row['agreement']:.2f} % | "
            f"{row['logit_difference']:g} | {mean} | {row.get('terms', '')} | {size} |"
        )
    lines += ["", "| dtype | original's own error, max (rms) | converted, max (rms) |",
              "|---|---|---|"]  # fmt: skip
    for row in result["rounding"]:
        lines.append(
            f"| {row['dtype']} | {row['original_max']:g} ({row['original_rms']:g}) | "
            f"{row['converted_max']:g} ({row['converted_rms']:g}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLE)
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--rounding-images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help="print these conversions, write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    args = parser.parse_args()
    images, labels = load_split(args.data, "test")
    data = images[: args.limit].to(args.device), labels[: args.limit].to(args.device)
    model = open_model(args.checkpoint).model.to(args.device).eval()
    original = logits_of(model, data[0], args.batch)
    without = logits_of(remove_bias(model), data[0], args.batch)
    rows = [
        {"name": "original", **score(original, data[1], original)},
        {"name": "no bias", **score(without, data[1], original)},
    ]
    for row in rows:
        print(row, flush=True)
    for name, options in settings():
        if args.only and name not in args.only:
            continue
        rows.append(converted_row(name, options, original, data, args))
        print(rows[-1], flush=True)
    if args.only:
        return
    for energy in ENERGIES:
        rows.append(raw_row(energy, original, data, args))
        print(rows[-1], flush=True)
    import timm

    cuda = torch.device(args.device).type == "cuda"
    result = {
        "card": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "images": len(data[1]),
        "dtype": "float32",
        "rows": rows,
        "rounding_images": args.rounding_images,
        "rounding": rounding_rows(data, args),
        "sites": spectra(args),
    }
    write(result, args.output)
    print(markdown(result))


def write(result: dict[str, Any], folder: Path) -> None:
    """JSON, CSV, table and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluate_swinv2.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "evaluate_swinv2.md").write_text(markdown(result))
    with (folder / "evaluate_swinv2.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rows"])
    draw(result, folder / "evaluate_swinv2.png")


if __name__ == "__main__":
    main()

"""Errors of the small Pangu-Weather before and after conversion, from the converted files.

python scripts/evaluate_pangu.py MODEL_FOLDER DATA.nc [--device cuda] [--output DIR]

Every row of the table is a file that was converted, closed and loaded again, except the original,
"no bias" and "zonal mean", which is no model at all. Errors are those of hidden points in the
longitudes that training did not see (``era_interim.py``). Writes evaluate_pangu.json, .csv, .md
and .png.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from era_interim import LEVELS, VARIABLES, Evaluation, Normalisation, read_fields
from torch import Tensor, nn

from flashbias_convert import DecomposeOptions, inspect_model, load_model
from flashbias_convert.checkpoint import convert_checkpoint, open_model
from flashbias_convert.decompose import rank_for_energy, spectrum
from flashbias_convert.errors import FlashBiasError
from flashbias_convert.models.pangu import EarthAttention3D, build
from flashbias_convert.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
ENERGIES = (0.9, 0.95, 0.99, 0.995, 0.999)
UNITS = {"z": "m2 s-2", "u": "m s-1", "v": "m s-1"}
FIELDS = tuple(f"{name}{level}" for name in VARIABLES for level in LEVELS)
COLUMNS = (
    "name", "rmse", *FIELDS, "difference_max", "difference_rms", "mean_rank", "max_rank",
    "terms", "file_mb", "seconds",
)  # fmt: skip


class Bench:
    """The model's folder, the data, and what the original makes of it.

    Args:
        folder: of the trained model.
        data: the ERA-Interim file.
        device: where everything runs.
    """

    def __init__(self, folder: Path, data: Path, device: torch.device) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = folder / "model.safetensors"
        self.arch = functools.partial(build, **config["args"])
        self.device = device
        self.norm = Normalisation.from_json(config["normalisation"])
        self.evaluation = Evaluation.of(self.norm.apply(read_fields(data)), device)
        self.original = self.evaluation.predict(self.open())

    def open(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The original, in evaluation mode; default in float32."""
        opened = open_model(self.weights, arch=self.arch, device=self.device, dtype=dtype)
        return opened.model.eval()

    def convert(self, options: DecomposeOptions, file: Path) -> Plan:
        """Write a converted file."""
        return convert_checkpoint(
            self.weights, file, options=options, arch=self.arch, device=self.device
        ).plan

    def load(self, file: Path, dtype: torch.dtype | None = None) -> nn.Module:
        """A converted file as a model."""
        return load_model(file, arch=self.arch, device=self.device, dtype=dtype)

    def score(self, predicted: Tensor) -> dict[str, Any]:
        """Errors in physical units and, over all fields, in standard deviations; differences
        from the original in standard deviations."""
        found = self.evaluation.rmse(predicted)
        physical = (found * self.norm.std.to(found)).flatten().tolist()
        away = predicted - self.original
        return {
            "rmse": float(f"{found.square().mean().sqrt():.5g}"),
            **{k: float(f"{v:.4g}") for k, v in zip(FIELDS, physical, strict=True)},
            "difference_max": float(f"{away.abs().max():.3g}"),
            "difference_rms": float(f"{away.square().mean().sqrt():.3g}"),
        }


def without_bias(model: nn.Module) -> nn.Module:
    """A copy whose bias is zero."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, EarthAttention3D):
            nn.init.zeros_(module.earth_specific_bias)
    return model


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


def ranks(plan: Plan) -> dict[str, Any]:
    """Ranks over the heads of all sites, and the kinds of terms."""
    every = [r for site in plan.patched for r in site.ranks()]
    kinds = sorted({d.term for site in plan.patched for d in site.decisions})
    return {
        "mean_rank": round(sum(every) / len(every), 1) if every else None,
        "max_rank": max(every, default=None),
        "terms": "+".join(kinds),
    }


def converted_row(bench: Bench, name: str, options: DecomposeOptions) -> dict[str, Any]:
    """Convert, load the file again, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.flashbias.safetensors"
        start = time.perf_counter()
        plan = bench.convert(options, file)
        seconds = time.perf_counter() - start
        size = file.stat().st_size
        model = bench.load(file)
    found = bench.score(bench.evaluation.predict(model))
    return {
        "name": name, **found, **ranks(plan),
        "file_mb": round(size / 1e6, 2), "seconds": round(seconds, 2),
    }  # fmt: skip


def rounding_rows(bench: Bench) -> list[dict[str, Any]]:
    """Exact conversion against float64, beside the original's own error in the same dtype."""
    truth = bench.evaluation.predict(bench.open(torch.float64))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exact.safetensors"
        bench.convert(DecomposeOptions(method="exact"), file)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            plain, exact = bench.open(dtype), bench.load(file, dtype)
            own, ours = (bench.evaluation.predict(m) - truth for m in (plain, exact))
            rows.append({
                "dtype": str(dtype).removeprefix("torch."),
                "original_max": float(f"{own.abs().max():.3g}"),
                "converted_max": float(f"{ours.abs().max():.3g}"),
                "original_rms": float(f"{own.square().mean().sqrt():.3g}"),
                "converted_rms": float(f"{ours.square().mean().sqrt():.3g}"),
            })  # fmt: skip
    return rows


def spectra(bench: Bench) -> list[dict[str, Any]]:
    """Per site: SVD time, and the rank of every window type and head for 95 and 99 % energy.

    A conversion gives a head one rank for all window types, the largest of them.
    """
    model = bench.open()
    rows = []
    for site in inspect_model(model, method="exact").patched:
        module: Any = model.get_submodule(site.name)
        bias = module.earth_specific_bias.detach()[0]  # (T, H, N, N)
        start = time.perf_counter()
        values = spectrum(bias).cpu()
        seconds = time.perf_counter() - start
        row = {"site": site.name, "n": site.n, "svd_seconds": round(seconds, 4)}
        for energy in (0.95, 0.99):
            row[f"rank_{energy:g}"] = rank_for_energy(values, energy).T.tolist()  # by head
        rows.append(row)
    return rows


def label(site: str) -> str:
    """The layer and the block of a site, like "1.0"."""
    parts = site.split(".")
    return parts[1].removeprefix("EarthSpecificLayer") + "." + parts[3][-1]


def draw(result: dict[str, Any], file: Path) -> None:
    """Error against mean rank, and the ranks of each layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = {row["name"]: row for row in result["rows"]}
    for title, pattern, marker in (
        ("smallest rank", "svd {:g} --no-fill", "o"),
        ("filled up", "svd {:g}", "^"),
    ):
        chosen = [rows[pattern.format(e)] for e in ENERGIES]
        chosen = [row for row in chosen if row["mean_rank"] is not None]
        if not chosen:
            continue
        at, error = zip(*((r["mean_rank"], r["rmse"]) for r in chosen), strict=True)
        left.plot(at, error, marker=marker, label=title)
        for row in chosen if marker == "o" else ():
            energy = row["name"].split()[1]
            left.annotate(energy, (row["mean_rank"], row["rmse"]), fontsize=8, ha="center",
                          textcoords="offset points", xytext=(0, 6))  # fmt: skip
    left.axhline(rows["original"]["rmse"], color="black", linewidth=1, label="original")
    left.axhline(rows["no bias"]["rmse"], color="gray", linestyle=":", label="no bias")
    left.set(xlabel="mean rank over all heads", ylabel="RMSE (standard deviations)",
             title="Error on unseen longitudes by rank")  # fmt: skip
    left.legend()
    at = range(len(result["sites"]))
    for offset, energy in ((-0.2, 0.95), (0.2, 0.99)):
        values = [[r for head in s[f"rank_{energy:g}"] for r in head] for s in result["sites"]]
        right.bar([i + offset for i in at], [sum(v) / len(v) for v in values], 0.38,
                  label=f"{100 * energy:g} % energy")  # fmt: skip
        right.scatter([i + offset for i, v in zip(at, values, strict=True) for _ in v],
                      [r for v in values for r in v], color="black", s=6, zorder=3)  # fmt: skip
    right.set_xticks(list(at), [label(s["site"]) for s in result["sites"]], fontsize=8)
    right.set(xlabel="layer.block", title="Rank by layer",
              ylabel="rank (bar: mean, dots: window types and heads)")  # fmt: skip
    right.legend()
    figure.savefig(file, dpi=130)


def markdown(result: dict[str, Any]) -> str:
    """The tables for a reader."""
    names = [f"{field} ({UNITS[field[0]]})" for field in FIELDS]
    lines = [
        "| conversion | RMSE | " + " | ".join(names) + " | largest (rms) difference | mean rank "
        "| terms | file |",
        "|---" * (len(FIELDS) + 6) + "|",
    ]
    for row in result["rows"]:
        fields = " | ".join(f"{row[field]:g}" for field in FIELDS)
        mean = "" if row.get("mean_rank") is None else f"{row['mean_rank']}"
        size = f"{row['file_mb']} MB" if "file_mb" in row else ""
        lines.append(
            f"| {row['name']} | {row['rmse']:.4f} | {fields} | {row['difference_max']:g} "
            f"({row['difference_rms']:g}) | {mean} | {row.get('terms', '')} | {size} |"
        )
    lines += ["", "| dtype | original's own error, max (rms) | converted, max (rms) |",
              "|---|---|---|"]  # fmt: skip
    for row in result["rounding"]:
        lines.append(
            f"| {row['dtype']} | {row['original_max']:g} ({row['original_rms']:g}) | "
            f"{row['converted_max']:g} ({row['converted_rms']:g}) |"
        )
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], folder: Path) -> None:
    """JSON, CSV, tables and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluate_pangu.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "evaluate_pangu.md").write_text(markdown(result))
    with (folder / "evaluate_pangu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rows"])
    draw(result, folder / "evaluate_pangu.png")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with config.json and model.safetensors")
    parser.add_argument("data", type=Path, help="eraint_uvz.nc")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    options = parser.parse_args()
    # errors are meant to be those of float32
    torch.backends.cudnn.allow_tf32 = False
    bench = Bench(options.folder, options.data, torch.device(options.device))
    bare = bench.evaluation.predict(without_bias(bench.open()))
    rows = [
        {"name": "original", **bench.score(bench.original)},
        {"name": "no bias", **bench.score(bare)},
        {"name": "zonal mean", **bench.score(bench.evaluation.zonal_mean())},
    ]
    for row in rows:
        print(row, flush=True)
    for name, conversion in settings():
        rows.append(converted_row(bench, name, conversion))
        print(rows[-1], flush=True)
    cuda = bench.device.type == "cuda"
    result = {
        "card": torch.cuda.get_device_name(bench.device) if cuda else "CPU",
        "torch": torch.__version__,
        "dtype": "float32",
        "fields": len(bench.evaluation.fields),
        "rows": rows,
        "rounding": rounding_rows(bench),
        "sites": spectra(bench),
    }
    write(result, options.output)
    print(markdown(result))


if __name__ == "__main__":
    try:
        main()
    except FlashBiasError as error:
        raise SystemExit(f"error: {error}") from error

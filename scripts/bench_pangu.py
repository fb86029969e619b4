"""Pangu-Weather at full size (721 x 1440, 13 levels): time, memory and change of the outputs.

python scripts/bench_pangu.py EXAMPLE_FOLDER [--output scripts/results/bench_pangu.csv]

The weights are random but for the position biases: each window type and head gets one that was
learned by the small model in EXAMPLE_FOLDER, drawn at random, so that ranks and errors are those of
learned biases. bfloat16, batch 1, eager. Differences are relative root mean squares to the original
in float32; the original in bfloat16 shows what rounding alone does.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.models.pangu import EarthAttention3D, build

ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "svd 0.99": {"method": "svd", "energy": 0.99},
    "svd 0.95": {"method": "svd", "energy": 0.95},
    "auto 0.99": {"method": "auto", "energy": 0.99},
}


def learned_biases(folder: Path) -> Tensor:
    """Every learned (144, 144) matrix of the small model, (count, 144, 144)."""
    tensors = load_file(folder / "model.safetensors")
    found = [t.flatten(0, -3) for k, t in tensors.items() if k.endswith("earth_specific_bias")]
    return torch.cat(found).float()


@torch.no_grad()
def fill(model: nn.Module, biases: Tensor) -> None:
    """Learned biases for every window type and head."""
    for module in model.modules():
        if isinstance(module, EarthAttention3D):
            own = module.earth_specific_bias
            drawn = torch.randint(len(biases), (own[..., 0, 0].numel(),))
            own.copy_(biases[drawn].reshape(own.shape))


@torch.inference_mode()
def measure(model: nn.Module, inputs: tuple[Tensor, ...], repeat: int) -> tuple[list[Tensor], Any]:
    """Outputs; milliseconds (median) and MiB on top of the weights."""
    out = model(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        model(*inputs)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return [x.float() for x in out], (statistics.median(times), peak)


def change(outputs: list[Tensor], reference: list[Tensor]) -> float:
    """Relative root mean square over all fields."""
    off = sum(
        float((a - b).double().square().sum()) for a, b in zip(outputs, reference, strict=True)
    )
    return (off / sum(float(b.double().square().sum()) for b in reference)) ** 0.5


def without_bias(model: nn.Module) -> None:
    """Set every position bias to zero, in place."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, EarthAttention3D):
                module.earth_specific_bias.zero_()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_pangu.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build().eval()
    fill(model, learned_biases(options.folder))
    model = model.cuda()
    shapes = ((1, 5, 13, 721, 1440), (1, 4, 721, 1440), (1, 1, 13, 721, 1440), (1, 3, 721, 1440))
    wide = tuple(torch.randn(shape, device="cuda") for shape in shapes)
    reference, _ = measure(model, wide, 1)
    model = model.bfloat16()
    inputs = tuple(x.bfloat16() for x in wide)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.unlink(missing_ok=True)

    def row(name: str, seconds: float, mean_rank: float | str) -> None:
        out, (ms, peak) = measure(model, inputs, options.repeat)
        values = {
            "model": name, "ms": f"{ms:.1f}", "peak_mib": f"{peak:.0f}",
            "difference": f"{change(out, reference):.3g}", "mean_rank": mean_rank,
            "conversion_seconds": f"{seconds:.1f}", "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }  # fmt: skip
        first = not options.output.exists()
        with options.output.open("a", newline="") as file:  # a run that is cut keeps its rows
            writer = csv.DictWriter(file, values)
            if first:
                writer.writeheader()
            writer.writerow(values)
        print(*values.values(), flush=True)

    row("original", 0.0, "")
    for name, how in METHODS.items():
        start = time.perf_counter()
        plan = patch_model(model, **how)
        ranks = [r for site in plan.sites for r in site.ranks()]
        mean = f"{statistics.mean(ranks):.1f}" if ranks else ""
        row(name, time.perf_counter() - start, mean)
        unpatch_model(model)
    without_bias(model)
    row("no bias", 0.0, "")


if __name__ == "__main__":
    main()

"""The least time that each shape of attention can take on this card, and what takes it.

python scripts/attention_floors.py [--shapes NAME ...] [--times FILE.csv] [--output FILE.csv]
python scripts/attention_floors.py --times-only [--times FILE.csv] [--output FILE.csv]

Attention takes an exponential a score, products of q, k, factors and values, reads of keys, values
and factors from the second-level cache by every block of queries, and each tensor once from
memory. How fast the card does each of these alone is measured first (`card_rates.py`); the floor is
the one that takes longest, as if all others were free beside it. The table shows them beside what
`bench_attention.py` has measured on such a card, and a picture as parts of it. With --times-only
nothing is measured: the times of the table are replaced, on any machine.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import row_file
import torch
from attention_launches import launched
from attention_shapes import SHAPES, Shape

from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape

ROOT = Path(__file__).resolve().parent.parent
#: what a floor is the largest of
LIMITS = ("exponentials", "products", "cached", "memory")
COLUMNS = ("shape", *(f"{name}_ms" for name in LIMITS), "floor_ms", "limit", "measured_ms",
           "card", "torch", "triton")  # fmt: skip
#: fewest rows of a product on the tensor cores
FEWEST_ROWS = 16
#: bytes of a number in half precision
HALF = 2


@dataclass(frozen=True)
class Work:
    """What a call takes at least, in the units of `card_rates.Rates`.

    Attributes:
        exponentials: one for each visible pair of a query and a key.
        products: operations, rows and columns rounded up to what tensor cores take.
        cached: bytes that all blocks of queries read.
        memory: bytes of all tensors, each once.
    """

    exponentials: float
    products: float
    cached: float
    memory: float


def work(
    shape: Shape, launch: LaunchShape, settings: LaunchSettings, tensor_bytes: int, dense: bool
) -> Work:
    """Count what a shape takes.

    Args:
        shape: the call.
        launch, settings: of its kernel, which say how wide its tiles are.
        tensor_bytes: of q, k, v, the output and the terms.
        dense: each pair reads a number of its own.
    """
    rows = shape.n if shape.queries is None else shape.queries
    pairs = math.prod(shape.batch) * shape.heads * _visible(shape, rows)
    width = launch.d + launch.dv + launch.columns
    # a block reads every key for all of its rows; the last block of few rows reads as much
    rounded = -(-rows // settings.block_m) * settings.block_m
    blocks = pairs / rows * rounded / settings.block_m
    least = max(rows, FEWEST_ROWS) / rows
    return Work(
        exponentials=pairs,
        products=2.0 * pairs * least * width,
        cached=blocks * width * HALF + pairs * HALF * dense / settings.entries,
        memory=tensor_bytes,
    )


def _visible(shape: Shape, rows: int) -> float:
    """Pairs of a query and a key of one head that is not hidden from it."""
    if not shape.options.get("causal"):
        return rows * shape.n
    return rows * (shape.n - rows) + rows * (rows + 1) / 2


def floors(work: Work, rates: Any) -> dict[str, float]:
    """Milliseconds that each limit takes alone.

    Args:
        work: see there.
        rates: `card_rates.Rates`.
    """
    return {name: 1e3 * getattr(work, name) / getattr(rates, name) for name in LIMITS}


def of_shape(shape: Shape, device: torch.device) -> Work:
    """What a shape takes, by the settings that it is launched with on a device."""
    q, k, v = shape.inputs(torch.bfloat16, device)
    bias = None if shape.bias is None else shape.bias(shape, device)
    prepared = None if bias is None else PreparedBias(bias)
    launch, settings = launched(
        lambda: flashbias_attention(q, k, v, prepared, backend="triton", **shape.options)
    )
    terms = {} if bias is None else dict(bias.named_tensors())
    total = sum(t.numel() * t.element_size() for t in (q, k, v, q, *terms.values()))
    return work(shape, launch, settings, total, "dense" in launch.terms)


def measured(path: Path, card: str) -> Mapping[str, float]:
    """Milliseconds of our kernel, by shape."""
    rows = row_file.read(path)
    ours = [r for r in rows if r["peer"] == "ours" and r["card"] == card and r["state"] == "ok"]
    return {row["shape"]: float(row["median_ms"]) for row in ours}


def row(name: str, work: Work, rates: Any, times: Mapping[str, float]) -> dict[str, Any]:
    """A row of the table but for card and versions."""
    found = floors(work, rates)
    limit = max(found, key=lambda key: found[key])
    return {
        "shape": name,
        **{f"{key}_ms": f"{ms:.4g}" for key, ms in found.items()},
        "floor_ms": f"{found[limit]:.4g}",
        "limit": limit,
        "measured_ms": f"{times[name]:.4g}" if name in times else "",
    }


def replace_times(output: Path, times: Path) -> None:
    """Set the measured times of a table anew, and draw it."""
    rows = row_file.read(output)
    for one in rows:
        found = measured(times, one["card"])
        if one["shape"] in found:
            one["measured_ms"] = f"{found[one['shape']]:.4g}"
    row_file.write(output, COLUMNS, rows)
    draw(output)


def draw(file: Path) -> None:
    """Write FILE.png beside FILE.csv: each limit as a part of the measured time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with file.open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["measured_ms"]]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.6), layout="constrained")
    colours = ("#ed553b", "#20639b", "#3caea3", "#999999")
    labels = ("exponentials", "products", "reads from the cache", "memory")
    height = 0.8 / len(LIMITS)
    for i, (name, colour, label) in enumerate(zip(LIMITS, colours, labels, strict=True)):
        parts = [float(r[f"{name}_ms"]) / float(r["measured_ms"]) for r in rows]
        where = [y + (i + 0.5) * height - 0.4 for y in range(len(rows))]
        axes.barh(where, parts, height, color=colour, label=label)
    axes.axvline(1.0, color="black", linewidth=1)
    shown = [f"{r['shape']}\n{float(r['measured_ms']):.3f} ms" for r in rows]
    axes.set_yticks(range(len(rows)), shown, fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
    axes.set_xlabel("time that each would take alone, as a part of what is measured")
    axes.set_title(f"What attention with a bias is made of, forward, bf16, {rows[0]['card']}")
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=4
    )
    figure.savefig(file.with_suffix(".png"), dpi=130)


def main() -> None:
    """Measure the card, count, print and write."""
    import triton
    from card_rates import measure
    from turns import alone

    results = ROOT / "scripts/results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--times", type=Path, default=results / "bench_attention.csv")
    parser.add_argument("--output", type=Path, default=results / "attention_floors.csv")
    parser.add_argument("--times-only", action="store_true", help="replace the times of the table")
    options = parser.parse_args()
    if options.times_only:
        replace_times(options.output, options.times)
        return
    device, card = torch.device("cuda"), torch.cuda.get_device_name()
    where = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
    measure(device)  # compiles, beside others
    with alone():
        rates = measure(device)
    print(*(f"{k}: {v:.4g} a second" for k, v in dataclasses.asdict(rates).items()), sep="\n")
    times = measured(options.times, card)
    rows = []
    for name in options.shapes:
        rows.append(row(name, of_shape(SHAPES[name], device), rates, times) | where)
        print(*(rows[-1][column] for column in COLUMNS[:7]), flush=True)
    row_file.write(options.output, COLUMNS, rows)
    draw(options.output)


if __name__ == "__main__":
    main()

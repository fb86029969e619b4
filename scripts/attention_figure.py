"""Bars of `bench_attention.py`: time of every peer over ours, shape by shape.

python scripts/attention_figure.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {
    "flash, no bias": "#bbbbbb",
    "cudnn, no bias": "#888888",
    "efficient, dense": "#f2b134",
    "cudnn, dense": "#ed553b",
    "flex, dense": "#3caea3",
    "flex, closed form": "#20639b",
}
#: of a kernel that the user gives
GIVEN_COLOUR = "#d977c5"


def draw(file: Path) -> None:
    """Write FILE.png beside FILE.csv."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with file.open(newline="") as lines:
        rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    times = {(r["shape"], r["peer"]): float(r["median_ms"]) for r in rows if r["state"] == "ok"}
    shapes = [s for s in dict.fromkeys(r["shape"] for r in rows) if (s, "ours") in times]
    given = [p for _, p in times if p not in COLOURS and not p.startswith(("ours", "flex"))]
    colours = COLOURS | dict.fromkeys(given, GIVEN_COLOUR)
    figure, axes = plt.subplots(figsize=(9, 0.7 * len(shapes) + 1.6), layout="constrained")
    height = 0.8 / len(colours)
    for i, (peer, colour) in enumerate(colours.items()):
        where = [y + (i + 0.5) * height - 0.4 for y in range(len(shapes))]
        ratio = [times.get((s, peer), float("nan")) / times[s, "ours"] for s in shapes]
        axes.margins(y=0.01)
        axes.barh(where, ratio, height, color=colour, label=peer)
        for y, value in zip(where, ratio, strict=True):
            if value == value:
                axes.text(value * 1.02, y, f"{value:.2f}", va="center", fontsize=6)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(shapes)), [f"{s}\n{times[s, 'ours']:.3f} ms" for s in shapes],
                    fontsize=7)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_xlabel("time of the peer over ours (right of the line: ours is faster)")
    axes.set_title(f"Attention with a bias, forward, bf16, {rows[0]['card']}")
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=6
    )
    figure.savefig(file.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts/results/bench_attention.csv")

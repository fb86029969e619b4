"""Ratios of `bench_backward.py`: markdown, and bars shape by shape.

python scripts/backward_figure.py [FILE.csv]

How many times as long as ours the best correct peer with a bias takes, and how many times as long
as the best attention without a bias ours takes. Each peer is compared by replayed times where it
and ours have them, else by eager calls, which is marked.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "ours"
COLOURS = {"frozen": "#20639b", "trained": "#ed553b"}
Row = dict[str, Any]


CLOCKS = ("step_ms", "call_ms")


def best(rows: list[Row], ours: Row) -> tuple[float, Row, str] | None:
    """The correct one that takes least beside ours: how many times as long, itself, and the clock.

    No clock is mixed with another: of a peer without a graph, eager calls are compared.
    """
    found = []
    for row in rows:
        clock = next((c for c in CLOCKS if row[c] and ours[c]), None)
        if row["state"] == "ok" and clock is not None:
            found.append((float(row[clock]) / float(ours[clock]), row, clock))
    return min(found, key=lambda one: one[0], default=None)


def ratios(file: Path) -> list[Row]:
    """A row for each shape and kind of bias that ours computes correctly."""
    with file.open(newline="") as lines:
        rows: list[Row] = list(csv.DictReader(lines))
    found = []
    for key in dict.fromkeys((r["shape"], r["bias"]) for r in rows):
        own = [r for r in rows if (r["shape"], r["bias"]) == key]
        ours = next((r for r in own if r["peer"] == OURS and r["state"] == "ok"), None)
        if ours is None:
            continue
        column = "step_ms" if ours["step_ms"] else "call_ms"
        told = {"shape": key[0], "bias": key[1], "clock": column, "ms": float(ours[column])}
        told |= {"call_ms": ours["call_ms"], "peak_mib": ours["peak_mib"]}
        others = [r for r in own if not r["peer"].startswith(OURS)]
        for name, has_bias in (("with", True), ("without", False)):
            other = best([r for r in others if ("no bias" in r["peer"]) != has_bias], ours)
            ratio, peer, clock = other or (None, {"peer": None}, column)
            told[name] = peer["peer"] if clock == column else f"{peer['peer']}, in calls"
            told[f"ratio_{name}"] = ratio
        found.append(told)
    return found


def table(file: Path) -> str:
    """Markdown."""
    out = [
        "| attention | bias | ours, step | eager | best other with the bias | ours over no bias |"
    ]
    out.append("|---|---|---|---|---|---|")
    for r in ratios(file):
        cells = [r["shape"], r["bias"], f"{r['ms']:.3f} ms", f"{float(r['call_ms']):.3f} ms"]
        other, none = r["ratio_with"], r["ratio_without"]
        cells.append("" if other is None else f"{other:.2f}x ({r['with']})")
        cells.append("" if none is None else f"{1 / none:.2f}x ({r['without'].split(',')[0]})")
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def draw(file: Path) -> None:
    """Write FILE.md and FILE.png beside FILE.csv."""
    file.with_suffix(".md").write_text(table(file))
    print(table(file))
    found = ratios(file)
    if not found:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(r["shape"] for r in found))
    size = (12, 0.42 * len(shapes) + 1.8)
    figure, panels = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    titles = (("ratio_with", "best correct peer with a bias, over ours"),
              ("ratio_without", "best attention without a bias, over ours"))  # fmt: skip
    for axes, (name, title) in zip(panels, titles, strict=True):
        for i, (bias, colour) in enumerate(COLOURS.items()):
            own = {r["shape"]: r[name] or float("nan") for r in found if r["bias"] == bias}
            where = [y + 0.36 * i - 0.18 for y in range(len(shapes))]
            values = [own.get(s, float("nan")) for s in shapes]
            axes.barh(where, values, 0.36, color=colour, label=f"{bias} bias")
            for y, value in zip(where, values, strict=True):
                if value == value:
                    axes.text(value, y, f" {value:.2f}", va="center", fontsize=6)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xlabel(f"{title} (right of the line: ours is faster)", fontsize=8)
        axes.margins(x=0.12, y=0.01)
    panels[0].set_yticks(range(len(shapes)), shapes, fontsize=7)
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=7)
    with file.open(newline="") as lines:
        card = next(csv.DictReader(lines))["card"]
    figure.suptitle(f"Attention with a bias, forward plus backward, {card}", fontsize=10)
    figure.savefig(file.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts/results/bench_backward.csv")

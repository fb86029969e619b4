"""Sentences and a picture of the Pairformer's table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.ticker import NullLocator
from pairformer_table import Table

CORE = "triangle attention, core"
STARTING = "triangle attention, starting"
#: of factors, in the picture
RANKS = ("32", "96")


def spent(row: dict[str, str]) -> float:
    """Milliseconds, of replays where there are any."""
    return float(row["replay_ms"] or row["ms"])


def told(table: Table) -> Iterator[str]:
    """How much faster the exact form is than its peers, triangle by triangle and for the block."""
    for component, way in ((CORE, "ours"), (STARTING, "ours, dense"), ("block", "ours, dense")):
        for row in table.good(component=component, way=way):
            same = table.good(component=component, n=row["n"], mode=row["mode"])
            peers = {r["way"]: spent(r) for r in same if not r["way"].startswith("ours")}
            ratios = (f"{ms / spent(row):.2f} x {name}" for name, ms in peers.items())
            if peers:
                what = f"{row['mode']}, N = {row['n']}, {component}"
                yield f"{what}: {way} is {', '.join(ratios)}"


def _by_length(axes: Any, rows: list[dict[str, str]]) -> None:
    """A line for each way; ours are solid, and of its ranks only some, lest nobody can read it."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["rank"] in ("", *RANKS):
            label = f"{row['way']}, rank {row['rank']}" if row["rank"] else row["way"]
            lines.setdefault(label, []).append((int(row["n"]), spent(row)))
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for label, points in sorted(lines.items(), key=lambda item: -max(item[1])[1]):
        style = "o-" if label.startswith("ours") else "s--"
        axes.plot(*zip(*sorted(points), strict=True), style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="N", ylabel="ms")
    lengths = sorted({n for points in lines.values() for n, _ in points})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    if lines:  # in the order in which they end
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """The core and a whole triangle attention by N, and the error of factors by their rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(21, 5.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    good = [r for r in rows if r["status"] == "ok" and r["mode"] == "inference"]
    for axes, component in ((left, CORE), (middle, STARTING)):
        _by_length(axes, [r for r in good if r["component"] == component])
        axes.set(title=component)
    for way, style in (("ours, factors kept", "-"), ("ours, networks", ":")):
        found = [r for r in good if r["component"] == STARTING and r["way"] == way and r["error"]]
        for n in sorted({int(r["n"]) for r in found}):
            points = [(int(r["rank"]), float(r["error"])) for r in found if int(r["n"]) == n]
            label = f"{way}, N = {n}"
            right.plot(*zip(*sorted(points), strict=True), style, marker="o", label=label)
    right.set(yscale="log", xlabel="rank", ylabel="relative error of the output, random weights")
    if right.lines:
        right.legend(fontsize=7)
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']}, torch {rows[0]['torch']}")
    figure.savefig(path, dpi=120)

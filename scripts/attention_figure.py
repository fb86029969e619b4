"""Bars of `bench_attention.py`: time of every peer over ours, shape by shape.

python scripts/attention_figure.py [FILE.csv]

Nothing is measured. A peer with a wrong result has a hatched bar and says so; one that failed, or
for which memory was too small, has words in the place of its bar. Where ours is not correct there
are no ratios, and every peer has words.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import row_file
from optional_peers import NOT_INSTALLED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
OURS = "ours"
#: greys and blue greys add no bias
COLOURS = {
    "ours, sdpa path": "#7b4fa3",
    "flash, no bias": "#c8c8c8",
    "cudnn, no bias": "#8f8f8f",
    "efficient, no bias": "#5c5c5c",
    "flash-attn 3, no bias": "#a9bfd6",
    "flash-attn 4, no bias": "#6b87a8",
    "efficient, dense": "#f2b134",
    "cudnn, dense": "#ed553b",
    "flex, dense": "#3caea3",
    "flex, dense, tuned": "#17645d",
    "flex, closed form": "#20639b",
    "flash-attn, alibi": "#8c564b",
    "xformers, dense": "#b8b02a",
    "cuequivariance, dense": "#76b900",
}
#: of a kernel that the user gives
GIVEN_COLOUR = "#d977c5"
#: states with words of their own; others are what an exception said
WORDS = ("wrong", "out of memory", "crashed")
#: characters of what an exception said
LONGEST = 46
#: shapes from which on there are two columns
MANY = 9
#: of what stands beside a bar, over the line at 1
TEXT: dict[str, Any] = {
    "va": "center", "fontsize": 6.5, "bbox": {"facecolor": "white", "linewidth": 0, "pad": 0.4}
}  # fmt: skip
#: height of a bar and of the gap between shapes, inches
BAR, GAP = 0.15, 0.16


def draw(file: Path) -> None:
    """Write FILE.png beside FILE.csv."""
    figure_of(row_file.read(file)).savefig(file.with_suffix(".png"), dpi=130)


def figure_of(rows: list[row_file.Row]) -> Figure:
    """The bars of all shapes; places are only for peers that have a row and were installed."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [row for row in rows if row["state"] != NOT_INSTALLED]
    shapes: dict[str, list[row_file.Row]] = {}
    for row in shown:
        shapes.setdefault(row["shape"], []).append(row)
    given = [p for p in dict.fromkeys(r["peer"] for r in shown) if p not in (OURS, *COLOURS)]
    colours = COLOURS | dict.fromkeys(given, GIVEN_COLOUR)
    columns = _columns(list(shapes.values()))
    height = max(sum(_height(own) for own in column) for column in columns)
    width = 8.6 * len(columns)
    figure = Figure(figsize=(width, height + 1.5), layout="constrained")
    limits = _limits(shapes.values())
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns,
                            strict=True):  # fmt: skip
        _draw_column(axes, column, colours, limits)
        axes.set_ylim(height, -GAP / 2)  # inches, from the top
    peers = dict.fromkeys(r["peer"] for r in shown)
    handles = [
        Patch(color=colours[name], label=f"{name} (given kernel)" if name in given else name)
        for name in colours if name in peers
    ]  # fmt: skip
    if any(row["state"] == "wrong" for row in shown):
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="wrong"))
    figure.suptitle(f"Attention with a bias, forward, bf16, {rows[0]['card']}")
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=3 * len(columns))
    return figure


def _columns(shapes: list[list[row_file.Row]]) -> list[list[list[row_file.Row]]]:
    """Shapes in one or two columns of about the same height."""
    if len(shapes) < MANY:
        return [shapes]
    total = sum(map(_height, shapes))
    cut = min(range(1, len(shapes)), key=lambda i: abs(total - 2 * sum(map(_height, shapes[:i]))))
    return [shapes[:cut], shapes[cut:]]


def _height(own: list[row_file.Row]) -> float:
    """Of a shape, in inches."""
    return BAR * max(2, sum(row["peer"] != OURS for row in own)) + GAP


def _ours(own: list[row_file.Row]) -> float | None:
    """Milliseconds of ours, if they are those of a correct result."""
    times = [r["median_ms"] for r in own if r["peer"] == OURS and r["state"] == "ok"]
    return float(times[0]) if times else None


def _ratio(row: row_file.Row, ours: float | None) -> float | None:
    timed = row["state"] in ("ok", "wrong") and row["median_ms"]
    return float(row["median_ms"]) / ours if timed and ours else None


def _limits(shapes: Any) -> tuple[float, float]:
    """Powers of two around all ratios, with room for short bars and for numbers."""
    ratios = [0.55, 12.0]
    for own in shapes:
        found = [_ratio(row, _ours(own)) for row in own]
        ratios += [x for x in found if x]
    return 2.0 ** math.floor(math.log2(min(ratios) / 1.1)), 2.0 ** math.ceil(
        math.log2(max(ratios) * 1.3)
    )


def _draw_column(
    axes: Axes,
    shapes: list[list[row_file.Row]],
    colours: dict[str, str],
    limits: tuple[float, float],
) -> None:
    low, high = limits
    order = list(colours)
    top, ticks, labels = 0.0, [], []
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    for own in shapes:
        ours = _ours(own)
        others = sorted((r for r in own if r["peer"] != OURS), key=lambda r: order.index(r["peer"]))
        for i, row in enumerate(others):
            _draw_bar(axes, top + (i + 0.5) * BAR, row, ours, colours[row["peer"]], low)
        ticks.append(top + (_height(own) - GAP) / 2)
        labels.append(f"{own[0]['shape']}\n{_said_of_ours(own)}")
        top += _height(own)
        axes.axhline(top - GAP / 2, color="#dddddd", linewidth=0.6)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    powers = [2.0**i for i in range(int(math.log2(low)), int(math.log2(high)) + 1)]
    axes.set_xticks(powers, [f"{x:g}" for x in powers])
    axes.set_xlabel("time of the peer over ours (right of the line: ours is faster)")


def _draw_bar(
    axes: Axes, y: float, row: row_file.Row, ours: float | None, colour: str, low: float
) -> None:
    """A bar from the left edge and its ratio, or a mark and words where there is none."""
    ratio = _ratio(row, ours)
    wrong = row["state"] == "wrong"
    if ratio is None:
        axes.plot(low * 1.03, y, "s", color=colour, markersize=5)
        axes.text(low * 1.08, y, _words(row), **TEXT)
        return
    how = {"facecolor": "white", "edgecolor": colour, "hatch": "//////"} if wrong else {}
    axes.barh(y, ratio - low, 0.92 * BAR, left=low, **(how or {"color": colour}))
    said = _words(row) if wrong else f"{ratio:.2f}"
    axes.text(ratio * 1.03, y, said, **TEXT)


def _words(row: row_file.Row) -> str:
    """A row without a ratio: its time, if it has one, and what became of it."""
    time = f"{float(row['median_ms']):.3f} ms" if row["median_ms"] else ""
    state = row["state"]
    if state == "ok":
        return time
    if state not in WORDS:
        said = state.split(": ", 1)[-1] if "Error: " in state else state
        said = said if len(said) <= LONGEST else f"{said[:LONGEST].rsplit(' ', 1)[0]} ..."
        state = f"failed: {said}" if said else "failed"
    return f"{time}, {state}" if time else state


def _said_of_ours(own: list[row_file.Row]) -> str:
    found = [row for row in own if row["peer"] == OURS]
    return " ".join(["", *map(_words, found)]).strip() if found else "ours: not measured"


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts/results/bench_attention.csv")

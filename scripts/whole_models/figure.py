"""Rows as a picture. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .case import EXACT, FORCED, ORIGINAL, OURS, WAYS, split_variant
from .writing import is_right

_COLORS = {"ours": "#1f5a99", "forced": "#1f5a99", "exact": "#6aa5dc", "svd-56": "#274060",
           "original": "#c0504d", "original-fused": "#8c3330", "sdpa": "#e0a458",
           "sdpa-cudnn": "#d4ac2b", "flex": "#6a9a5b", "flex-alibi": "#3f6b33",
           "none": "#b5b5b5", "none-cudnn": "#8f8f8f", "none-flex": "#cfcfcf"}  # fmt: skip
_PAPER = "#7b4fa3"
_MODES = {"eager": "eager", "compiled": "compiled", "graphs": "CUDA graphs",
          "warm": "compiled after a call", "layers": "blocks compiled"}  # fmt: skip
_MARKS = {"eager": "o", "compiled": "s", "graphs": "^", "warm": "v", "layers": "D"}
_COLUMNS = 3
#: a panel each, up to so many models; of more, a line each in one chart
_MOST_PANELS = 20
#: a bar that is so many times as long as the shortest is cut, so that others can be told apart
_CUT = 10.0
#: and shown whole all the same, if it is not so much longer than those that are
_LITTLE = 1.5
_OUT_OF_MEMORY = "out of memory"


def words(variant: str) -> str:
    """What a variant is, such as "dense bias, FlexAttention, compiled"."""
    way, mode = split_variant(variant)
    return f"{WAYS[way].replace('by hand, ', '')}, {_MODES[mode]}"


def number(value: float) -> str:
    """Three digits, and all those before the point: "3,080", "27.4", "0.0342"."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def draw(
    rows: Sequence[dict[str, str]],
    path: Path,
    title: str = "",
    unit: str = "ms, median",
    per_ms: float = 1.0,
) -> None:
    """Bars of time, the shortest first, one panel per model; ratios where there are many models.

    What failed has its reason in the place of a bar, and stands last. Where rows have numbers of
    the paper ("paper_time", in `unit`), these stand beside the bars.

    Args:
        rows: of a table.
        path: of the picture.
        title: above everything.
        unit: below the bars.
        per_ms: how much of it a millisecond is.
    """
    from flashbias_convert.plotting.figure import new_figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return
    if len(models) > _MOST_PANELS:
        draw_ratios(rows, path, title)
        return
    columns = min(_COLUMNS, len(models))
    lines = math.ceil(len(models) / columns)
    own = {model: [row for row in rows if row["model"] == model] for model in models}
    heights = [
        0.24 * max(len(own[model]) for model in models[i * columns : (i + 1) * columns]) + 1.1
        for i in range(lines)
    ]
    wide = 9.0 if any(row.get("paper_time") for row in rows) else 7.0
    figure = new_figure(wide * columns, sum(heights) + 0.3)
    grid = figure.subplots(lines, columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    axes = list(grid.flat)
    for ax, model in zip(axes, models, strict=False):
        _bars(ax, _by_time(own[model]), unit, per_ms)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    if len(models) == 1:  # says what it is once, in the middle
        axes[0].set_title("")
        title = _joined(title, models[0])
    _title(figure, title, rows)
    figure.savefig(path, dpi=110)


def _joined(title: str, model: str) -> str:
    if title in model or model in title:
        return max(title, model, key=len)
    return f"{title}, {model}"


def _title(figure: Any, title: str, rows: Sequence[dict[str, str]]) -> None:
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    figure.suptitle(", ".join(filter(None, (title, devices, rows[0]["dtype"]))), fontsize=10)


def _by_time(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(rows, key=lambda row: float(row["median_ms"] or math.inf))


def _bars(ax: Any, rows: Sequence[dict[str, str]], unit: str, per_ms: float) -> None:
    times = [float(row["median_ms"]) * per_ms for row in rows if row["median_ms"]]
    shown = max((t for t in times if t <= _CUT * min(times)), default=1.0)
    is_cut = max(times, default=0.0) > _LITTLE * shown
    shown = shown if is_cut else max(times, default=1.0)
    end = 1.12 * shown if is_cut else shown
    for i, row in enumerate(rows):
        time = float(row["median_ms"] or 0) * per_ms
        way, mode = split_variant(row["variant"])
        wrong, own = row["status"] == "wrong", min(time, end)
        look = {"alpha": 0.3 if wrong else 1.0, "hatch": "////" if mode == "eager" else ""}
        ax.barh(i, own, color=_COLORS.get(way, "#888888"), edgecolor="white", linewidth=0, **look)
        if time > end:  # the bar goes on
            for place in (0.925, 0.945):
                ax.plot([place * end, (place + 0.02) * end], [i + 0.45, i - 0.45], color="white",
                        linewidth=2)  # fmt: skip
        said = number(time) if time else _reason(row)
        ax.text(own, i, f" {said} (wrong)" if wrong else f" {said}", va="center", fontsize=7)
        if row.get("paper_time"):
            ax.text(1.02, i, _published(row), va="center", fontsize=7,
                    color=_PAPER, transform=ax.get_yaxis_transform())  # fmt: skip
    if any(row.get("paper_time") for row in rows):
        ax.text(1.02, -0.9, "the paper, A100 (to no bias)", va="center", fontsize=7, color=_PAPER,
                fontweight="bold", transform=ax.get_yaxis_transform())  # fmt: skip
    names = ["\n".join(textwrap.wrap(words(row["variant"]), 52)) for row in rows]
    ax.set_yticks(range(len(rows)), names, fontsize=7)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.18 * end)
    ax.set_xlabel(f"{unit}; longer bars are cut" if is_cut else unit, fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title(rows[0]["model"], fontsize=9)


def _reason(row: dict[str, str]) -> str:
    return textwrap.shorten(row["reason"], 60, placeholder=" ...").rstrip(":")


def _published(row: dict[str, str]) -> str:
    delta = float(row["paper_delta"] or 0)
    return f"{row['paper_row']}: {row['paper_time']}" + (f" ({delta:+g})" if delta else "")


def draw_lengths(rows: Sequence[dict[str, str]], path: Path, title: str) -> None:
    """Milliseconds, memory and memory of the biases by length, a line per variant.

    What failed, or is wrong, is marked at the top: out of memory, or for another reason.

    Args:
        rows: of models whose names end in their length; the rest of the name makes a row of panels.
        path: of the picture.
        title: above everything.
    """
    from flashbias_convert.plotting.figure import new_figure

    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    figure = new_figure(16.5, 4.2 * len(kinds) + 0.4)
    panels = figure.subplots(len(kinds), len(_AXES), squeeze=False)
    for kind, line in zip(kinds, panels, strict=True):
        own = [row for row in rows if _kind(row) == kind]
        variants = sorted({row["variant"] for row in own}, key=_place)
        for ax, (column, label) in zip(line, _AXES.items(), strict=True):
            for variant in variants:
                _line(ax, [row for row in own if row["variant"] == variant], column)
            _length_axes(ax, own)
            ax.set_ylabel(label)
        for ax in line[:2]:
            _failures(ax, own)
        line[0].set_title(kind, fontsize=9)
        handles, labels = line[0].get_legend_handles_labels()
        line[-1].legend(handles, labels, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0),
                        borderaxespad=0.0)  # fmt: skip
    lost = {row["reason"] for row in rows if row["status"] in _LOST}
    note = "; x: out of memory" if _OUT_OF_MEMORY in lost else ""
    note += "; +: failed, or wrong" if lost - {_OUT_OF_MEMORY} else ""
    _title(figure, title, [{**rows[0], "dtype": f"{rows[0]['dtype']}{note}"}, *rows[1:]])
    figure.savefig(path, dpi=110)


_AXES = {"median_ms": "ms, median", "peak_mib": "MiB beyond weights", "bias_mib": "MiB of bias"}


#: states of rows that have no place in a line
_LOST = ("failed", "wrong")


def _kind(row: dict[str, str]) -> str:
    return row["model"].rpartition(" ")[0].rstrip(",")


def _length_axes(ax: Any, rows: Sequence[dict[str, str]]) -> None:
    lengths = sorted({int(row["tokens"]) for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    ax.set_xlabel("tokens")
    ax.grid(alpha=0.3)


def _place(variant: str) -> tuple[int, int]:
    """Ways in their order, and modes of a way beside each other."""
    way, mode = split_variant(variant)
    return list(WAYS).index(way), list(_MODES).index(mode)


def _style(variant: str) -> dict[str, Any]:
    """Filled and dashed where compiled, so that two lines on each other are both seen."""
    way, mode = split_variant(variant)
    colour = _COLORS.get(way, "#888888")
    return {"color": colour, "marker": _MARKS[mode], "markersize": 5 if mode == "eager" else 4,
            "markerfacecolor": "white" if mode == "eager" else colour,
            "linestyle": "-" if mode == "eager" else "--",
            "linewidth": 2.0 if way in (OURS, EXACT, FORCED) else 1.2}  # fmt: skip


def _line(ax: Any, rows: Sequence[dict[str, str]], column: str) -> None:
    found = sorted(
        (int(row["tokens"]), float(row[column]))
        for row in rows
        if is_right(row) and float(row[column] or 0) > 0
    )
    if found:
        variant = rows[0]["variant"]
        ax.plot(*zip(*found, strict=True), label=words(variant), **_style(variant))


def _failures(ax: Any, rows: Sequence[dict[str, str]]) -> None:
    """Marks at the top, below each other, in the colours of their lines."""
    lost = [row for row in rows if row["status"] in _LOST]
    order = sorted({row["variant"] for row in lost}, key=_place)
    _, known = ax.get_legend_handles_labels()
    if lost:  # above everything that is measured
        low, high = (math.log(y) for y in ax.get_ylim())
        ax.set_ylim(top=math.exp(low + (high - low) / (0.94 - 0.045 * len(order))))
    for row in lost:
        label, place = words(row["variant"]), order.index(row["variant"])
        mark = "x" if row["reason"] == _OUT_OF_MEMORY else "+"
        ax.plot(int(row["tokens"]), 0.96 - 0.045 * place, mark, markersize=8, markeredgewidth=1.8,
                color=_style(row["variant"])["color"], transform=ax.get_xaxis_transform(),
                label=None if label in known else label)  # fmt: skip
        known = [*known, label]


def draw_ratios(rows: Sequence[dict[str, str]], path: Path, title: str = "") -> None:
    """How many times as fast as the original, compiled, ours is: a line per model, sorted.

    Two marks each: of calls, and of what the card takes, where that is known.

    Args:
        rows: of a table.
        path: of the picture.
        title: above everything.
    """
    from flashbias_convert.plotting.figure import new_figure

    found = sorted(ratios(rows).items(), key=lambda item: item[1][0])
    if not found:
        return
    figure = new_figure(9.0, 0.17 * len(found) + 1.2)
    ax = figure.subplots()
    calls, cards = [x for _, (x, _) in found], [x for _, (_, x) in found]
    ends = [max(call, card or 0.0) for call, card in zip(calls, cards, strict=True)]
    ax.barh(range(len(found)), [x - 1.0 for x in calls], left=1.0, color="#6aa5dc", height=0.62)
    ax.plot(calls, range(len(found)), "o", color="#1f5a99", markersize=4.5, label="calls")
    known = [(card, i) for i, card in enumerate(cards) if card is not None]
    if known:
        ax.plot(*zip(*known, strict=True), "D", color="#c0504d", markersize=3.5,
                label="the card alone (the model as a CUDA graph)")  # fmt: skip
    for i, (call, end) in enumerate(zip(calls, ends, strict=True)):
        ax.text(end, i, f"  {call:.2f}", va="center", fontsize=7)
    ax.axvline(1.0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(found)), [name for name, _ in found], fontsize=7)
    ax.set_ylim(-0.8, len(found) - 0.2)
    ax.set_xlim(min(0.9, *calls, *(x for x in cards if x)) - 0.05, 1.08 * max(ends))
    ax.set_xlabel("time of the original / ours, both compiled; numbers are those of calls",
                  fontsize=8)  # fmt: skip
    ax.grid(axis="x", alpha=0.3)
    ax.legend(fontsize=8, loc="lower right")
    _title(figure, title or "how many times as fast as the original", rows)
    figure.savefig(path, dpi=120)


def ratios(rows: Sequence[dict[str, str]]) -> dict[str, tuple[float, float | None]]:
    """How many times as fast ours is, compiled: by calls, and by the card alone if that is known.

    Args:
        rows: of a table.

    Returns:
        By model; what a plan leaves alone, and is converted all the same, says so in its name.
    """
    known = {(row["model"], row["variant"]): row for row in rows if is_right(row)}
    found: dict[str, tuple[float, float | None]] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        original = known.get((model, f"{ORIGINAL}-compiled"))
        way = OURS if (model, f"{OURS}-compiled") in known else FORCED
        ours = known.get((model, f"{way}-compiled"))
        if original is None or ours is None:
            continue
        call = float(original["median_ms"]) / float(ours["median_ms"])
        has_both = original.get("replay_ms") and ours.get("replay_ms")
        card = float(original["replay_ms"]) / float(ours["replay_ms"]) if has_both else None
        found[model if way == OURS else f"{model} (a plan leaves it alone)"] = call, card
    return found

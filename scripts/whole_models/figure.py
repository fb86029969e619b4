"""Rows as a picture. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .case import split_variant
from .writing import is_right

_COLORS = {"ours": "#2f6fab", "forced": "#2f6fab", "exact": "#7fb0dc", "none": "#bdbdbd",
           "original": "#c0504d", "sdpa": "#e0a458", "sdpa-cudnn": "#f0cfa0",
           "none-cudnn": "#dddddd", "none-flex": "#eeeeee", "flex": "#6a9a5b",
           "flex-alibi": "#a9c99a"}  # fmt: skip
_COLUMNS = 3
_MARKS = {"eager": "o", "compiled": "s", "graphs": "^", "warm": "v", "layers": "D"}


def draw(rows: Sequence[dict[str, str]], path: Path, title: str = "") -> None:
    """Bars of milliseconds, one panel per model; what failed has its reason in the place of a bar.

    Args:
        rows: of a table.
        path: of the picture.
        title: above everything.
    """
    from flashbias_convert.plotting.figure import new_figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return
    columns = min(_COLUMNS, len(models))
    lines = math.ceil(len(models) / columns)
    most = max(sum(row["model"] == model for row in rows) for model in models)
    figure = new_figure(6.0 * columns, (0.24 * most + 1.1) * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, model in zip(axes, models, strict=False):
        _bars(ax, [row for row in rows if row["model"] == model])
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    figure.suptitle(", ".join(filter(None, (title, devices, rows[0]["dtype"]))), fontsize=10)
    figure.savefig(path, dpi=110)


def _bars(ax: Any, rows: Sequence[dict[str, str]]) -> None:
    for i, row in enumerate(rows):
        ms = float(row["median_ms"] or 0)
        way = split_variant(row["variant"])[0]
        wrong = row["status"] == "wrong"
        ax.barh(i, ms, color=_COLORS.get(way, "#888888"), alpha=0.3 if wrong else 1.0)
        said = f" {ms:.3g}" if ms else f" {row['reason'][:40]}"
        ax.text(ms, i, f"{said} (wrong)" if wrong else said, va="center", fontsize=7)
    ax.set_yticks(range(len(rows)), [row["variant"] for row in rows], fontsize=7)
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel("ms, median", fontsize=8)
    ax.set_title(rows[0]["model"], fontsize=9)


def draw_lengths(rows: Sequence[dict[str, str]], path: Path, title: str) -> None:
    """Milliseconds, memory and memory of the biases by length, a line per variant.

    Args:
        rows: of models whose names end in their length; the rest of the name makes a row of panels.
        path: of the picture.
        title: above everything.
    """
    from flashbias_convert.plotting.figure import new_figure

    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    figure = new_figure(15.0, 3.8 * len(kinds) + 0.4)
    panels = figure.subplots(len(kinds), len(_AXES), squeeze=False)
    for kind, line in zip(kinds, panels, strict=True):
        own = [row for row in rows if _kind(row) == kind]
        for ax, (column, label) in zip(line, _AXES.items(), strict=True):
            for variant in dict.fromkeys(row["variant"] for row in own):
                _line(ax, [row for row in own if row["variant"] == variant], column)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set(xlabel="N", ylabel=label)
        line[0].set_title(kind, fontsize=9)
        line[0].legend(fontsize=7)
    figure.suptitle(f"{title}, {rows[0]['device']}, {rows[0]['dtype']}", fontsize=10)
    figure.savefig(path, dpi=110)


_AXES = {"median_ms": "ms, median", "peak_mib": "MiB beyond weights", "bias_mib": "MiB of bias"}


def _kind(row: dict[str, str]) -> str:
    return row["model"].rpartition(" ")[0].rstrip(",")


def _line(ax: Any, rows: Sequence[dict[str, str]], column: str) -> None:
    found = sorted(
        (int(row["tokens"]), float(row[column]))
        for row in rows
        if is_right(row) and float(row[column] or 0) > 0
    )
    if found:
        way = split_variant(rows[0]["variant"])[0]
        ax.plot(*zip(*found, strict=True), marker=_MARKS[rows[0]["mode"]], markersize=4,
                color=_COLORS.get(way), label=rows[0]["variant"],
                linestyle="-" if rows[0]["mode"] == "eager" else "--")  # fmt: skip

"""A report as a picture: whole models as bars, attention by length as lines. Needs matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..plotting.figure import new_figure
from .result import BenchmarkReport, BreakEven, Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3


def benchmark_figure(report: BenchmarkReport) -> Figure:
    """One panel per batch of inputs, and one per kind of site.

    Raises:
        UsageError: matplotlib is missing.
    """
    panels = len(report.cases) + len(report.break_even)
    columns = min(_COLUMNS, max(1, panels))
    lines = max(1, math.ceil(panels / columns))
    figure = new_figure(5.4 * columns, 3.4 * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, case in zip(axes, report.cases, strict=False):
        _bars(ax, case)
    for ax, kind in zip(axes[len(report.cases) :], report.break_even, strict=False):
        _lines(ax, kind)
    for ax in axes[panels:]:
        ax.set_axis_off()
    figure.suptitle(f"{report.device_name} ({report.device}), {report.dtype}", fontsize=10)
    return figure


def _bars(ax: Axes, case: Case) -> None:
    times = [row.median_ms for row in case.rows]
    colors = ["#4a7fb5" if row.name.startswith("converted") else "#b8b8b8" for row in case.rows]
    names = [
        row.name if row.median_ms is not None else f"{row.name} ({row.status})" for row in case.rows
    ]
    at = range(len(case.rows))
    ax.barh(at, [ms or 0.0 for ms in times], color=colors)
    ax.set_yticks(at, names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("ms, median")
    ax.set_title(case.inputs, fontsize=9)


def _lines(ax: Axes, kind: BreakEven) -> None:
    for name in dict.fromkeys(row.name for point in kind.points for row in point.rows):
        found = [
            (point.n, row.median_ms)
            for point in kind.points
            for row in point.rows
            if row.name == name and row.median_ms is not None
        ]
        if found:
            lengths, times = zip(*found, strict=True)
            ax.plot(lengths, times, marker="o", markersize=3, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="N", ylabel="ms, median")
    if kind.n is not None:
        ax.axvline(kind.n, color="black", linestyle="--", linewidth=1)
    terms = "+".join(kind.terms)
    ax.set_title(f"{kind.heads} heads of {kind.head_dim}, {terms}", fontsize=9)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)

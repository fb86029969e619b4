"""Figures of a whole plan: ranks and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plan import Plan, SitePlan
from .figure import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: names under the bars
_MOST_NAMES = 40


def ranks_figure(plan: Plan) -> Figure:
    """Rank by layer: a bar for the mean over heads, a dot per head."""
    sites = [site for site in plan.sites if site.ranks()]
    figure = new_figure(min(18.0, max(6.4, 0.45 * len(sites) + 1.5)), 4.4)
    ax = figure.subplots()
    if not sites:
        ax.text(0.5, 0.5, "no head has a low-rank term", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return figure
    at = range(len(sites))
    ax.bar(at, [sum(s.ranks()) / len(s.ranks()) for s in sites], color="#9dbfe0", label="mean")
    dots = [(x, rank) for x, site in zip(at, sites, strict=True) for rank in site.ranks()]
    size = 12 if len(sites) <= _MOST_NAMES else 3
    xs, ranks = zip(*dots, strict=True)
    ax.scatter(xs, ranks, color="black", s=size, zorder=3, label="a head")
    _name_bars(ax, sites)
    ax.set_ylabel("rank")
    ax.set_title("Rank by site", fontsize=10)
    ax.legend(fontsize=8)
    return figure


def _name_bars(ax: Axes, sites: Sequence[SitePlan]) -> None:
    step = math.ceil(len(sites) / _MOST_NAMES)
    names = short_names([site.name for site in sites])
    ax.set_xticks(range(0, len(sites), step), names[::step], rotation=60, ha="right", fontsize=8)
    ax.set_xlim(-0.6, len(sites) - 0.4)


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the parts that all of them begin or end with."""
    parts = [name.split(".") for name in names]
    if len(parts) < 2:
        return list(names)
    least = min(map(len, parts)) - 1
    first, last = 0, 0
    while first < least and len({p[first] for p in parts}) == 1:
        first += 1
    while last < least - first and len({p[-1 - last] for p in parts}) == 1:
        last += 1
    return [".".join(p[first : len(p) - last]) for p in parts]


def errors_figure(plan: Plan) -> Figure:
    """Histograms over all heads: attention error, logit error, and energy lost."""
    heads = [d for site in plan.sites for d in site.decisions]
    limit = plan.options.max_attention_error
    panels: tuple[tuple[str, list[float], float | None], ...] = (
        ("attention error", [d.attention_error for d in heads], limit),
        ("root mean square logit error", [d.logit_error_rms for d in heads], None),
        ("energy lost", [1 - d.energy for d in heads], 1 - plan.options.energy),
    )
    figure = new_figure(11, 3.4)
    for ax, (title, values, line) in zip(figure.subplots(1, 3), panels, strict=True):
        _histogram(ax, values, line)
        ax.set(xlabel=title)
    figure.axes[0].set_ylabel("heads")
    figure.suptitle(f"What {len(heads)} heads lose (dashed: the limit)", fontsize=10)
    return figure


def _histogram(ax: Axes, values: Sequence[float], limit: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    top = max(values, default=0.0)
    # a limit far beyond all values would squeeze them into one bar
    shown = limit if limit is not None and limit <= 4 * top else None
    right = max(top, shown or 0.0) or 1.0
    ax.hist(values, bins=30, range=(0.0, 1.02 * right), color="#4a7fb5")
    if shown is not None:
        ax.axvline(shown, color="black", linestyle="--", linewidth=1)
    elif limit is not None:
        ax.set_title(f"the limit {limit:g} is far to the right", fontsize=8)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))

"""Figures of one site: heat maps of its heads, and their spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import UsageError
from ..plan import SitePlan
from ..views import SiteView
from .figure import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: heads in one legend
_MOST_LINES = 16
_COLOURS = "RdBu_r"
#: ticks of the energy axis, as the share that is lost
_LOSSES = (1.0, 0.5, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0001)
_LEAST_LOSS = 1e-4


def heads_figure(view: SiteView, heads: Sequence[int]) -> Figure:
    """Heat maps of some heads: bias, what its terms make of it, and what they miss.

    Args:
        view: a site with something to draw.
        heads: which, one row each.

    Raises:
        UsageError: matplotlib is missing, or there is nothing to draw.
    """
    bias = _drawable(view)
    residual = view.residual()
    columns = ["bias, rows centred"]
    if residual is not None:
        columns += ["terms", "residual (own scale)"]
    figure = new_figure(3.1 * len(columns) + 0.9, 2.6 * len(heads) + 0.7)
    axes = figure.subplots(len(heads), len(columns), squeeze=False)
    for row, head in zip(axes, heads, strict=True):
        shown = [bias[head]]
        if residual is not None and view.approximation is not None:
            shown += [view.approximation[head], residual[head]]
        scale = float(bias[head].abs().max())
        for column, (ax, matrix) in enumerate(zip(row, shown, strict=True)):
            own = float(matrix.abs().max()) if column == 2 else scale
            _heat_map(figure, ax, matrix, own)
        row[0].set_ylabel(f"head {head}\n{_head_words(view.site, head)}", fontsize=8)
    for ax, title in zip(axes[0], columns, strict=True):
        ax.set_title(title, fontsize=9)
    figure.suptitle(_title(view), fontsize=10)
    return figure


def _drawable(view: SiteView) -> Tensor:
    if view.bias is None:
        raise UsageError(f"there is nothing to draw of {view.site.name}: {view.note}")
    return view.bias


def _heat_map(figure: Figure, ax: Axes, matrix: Tensor, scale: float) -> None:
    scale = scale or 1.0  # a map of zeros is white
    image = ax.imshow(
        matrix.numpy(), cmap=_COLOURS, vmin=-scale, vmax=scale, interpolation="nearest"
    )
    ax.set_xticks([])
    ax.set_yticks([])
    bar = figure.colorbar(image, ax=ax, shrink=0.85, pad=0.02)
    bar.ax.tick_params(labelsize=7)


def _head_words(site: SitePlan, head: int) -> str:
    """What was decided for a head: "low_rank, rank 16" and what it loses."""
    decision = next((d for d in site.decisions if d.head == head), None)
    if decision is None:
        return ""
    rank = "" if decision.rank is None else f", rank {decision.rank}"
    return f"{decision.term}{rank}\nattention error {decision.attention_error:.3f}"


def _title(view: SiteView) -> str:
    site = view.site
    note = f"\n{view.note}" if view.note else ""
    return f"{site.name or '(the model)'}   {site.n} x {site.m}, {site.status}{note}"


def energy_figure(view: SiteView, threshold: float) -> Figure:
    """Share of the row-centred energy against rank, one line per head.

    Args:
        view: a site whose bias was decomposed.
        threshold: the energy that was asked for; a dashed line. A dot on a head's line is the
            rank that its term has.
    """
    if view.energy is None:
        raise UsageError(f"there is no spectrum of {view.site.name}", view.note)
    figure = new_figure(6.4, 4.2)
    ax = figure.subplots()
    ranks = {d.head: d.rank for d in view.site.decisions}
    # what is left, on a logarithmic scale: 99 and 99.9 % are far apart where it matters
    lost = (1 - view.energy).clamp(min=_LEAST_LOSS / 2)
    for head, values in enumerate(lost.tolist()):
        (line,) = ax.plot(range(1, len(values) + 1), values, linewidth=1.2, label=f"head {head}")
        rank = ranks.get(head)
        if rank:
            ax.plot(rank, values[rank - 1], "o", color=line.get_color(), markersize=5)
    if threshold < 1:
        ax.axhline(1 - threshold, color="black", linestyle="--", linewidth=1)
    ax.set_yscale("log")
    ax.set_ylim(1.0, _LEAST_LOSS)
    ax.set_yticks(_LOSSES, [f"{100 * (1 - loss):.12g} %" for loss in _LOSSES], minor=False)
    ax.set_xlim(1, _interesting_rank(view.energy, [r for r in ranks.values() if r]))
    asked = f"dashed: the {100 * threshold:g} % that were asked for; dot: the chosen rank"
    ax.set(xlabel=f"rank ({asked})", ylabel="share of the row-centred energy")
    ax.grid(alpha=0.25)
    if len(lost) <= _MOST_LINES:
        ax.legend(fontsize=8, ncols=2 if len(lost) > 6 else 1, loc="lower right")
    ax.set_title(_title(view), fontsize=10)
    return figure


def _interesting_rank(energy: Tensor, ranks: Sequence[int]) -> int:
    """Up to where the curves say something: 99.99 % of every head, and all chosen ranks."""
    enough = int((energy < 0.9999).sum(-1).max()) + 1
    most = energy.shape[-1]
    return max(2, min(most, max([math.ceil(1.1 * r) for r in ranks] + [enough])))

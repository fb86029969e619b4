"""A figure without global state: matplotlib is imported when the first one is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        UsageError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "figures need matplotlib, which is not installed",
            "pip install 'flashbias-convert[plot]'",
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, cut to what is drawn."""
    figure.savefig(path, dpi=110, bbox_inches="tight", format="png")


def require_matplotlib() -> None:
    """Raise UsageError where no figure can be made."""
    new_figure(1, 1)

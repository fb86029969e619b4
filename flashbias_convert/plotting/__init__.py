"""Figures of a plan: biases, spectra, ranks and errors. Needs matplotlib."""

from .figure import require_matplotlib, save_figure
from .folder import check_folder, draw_plan
from .plan_figures import errors_figure, ranks_figure
from .site_figures import energy_figure, heads_figure

__all__ = [
    "check_folder",
    "draw_plan",
    "energy_figure",
    "errors_figure",
    "heads_figure",
    "ranks_figure",
    "require_matplotlib",
    "save_figure",
]

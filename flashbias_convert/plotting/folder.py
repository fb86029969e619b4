"""All figures of a plan in one folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from ..errors import UsageError
from ..plan import Plan, SitePlan
from ..recipe import Recipe
from ..views import SiteView, site_views
from .figure import require_matplotlib, save_figure
from .plan_figures import errors_figure, ranks_figure
from .site_figures import energy_figure, heads_figure

#: heads in one figure of heat maps
HEADS_PER_FIGURE = 6
#: sites with figures of their own; the ones that lose most, where there are more
MAX_SITES = 40
Progress = Callable[[int, int, str], None]


def check_folder(folder: Path) -> None:
    """Raise UsageError unless figures can be written into `folder`: it is new, or empty."""
    require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "choose another one for --plot")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"the folder {folder} is not empty", "choose another one for --plot")
    if not folder.parent.is_dir():
        raise UsageError(f"the folder {folder.parent} does not exist")


def draw_plan(
    model: nn.Module,
    plan: Plan,
    folder: Path,
    *,
    recipes: Iterable[Recipe] = (),
    progress: Progress | None = None,
) -> tuple[list[Path], list[str]]:
    """Write all figures of a plan as PNG.

    Args:
        model: the one that the plan was made for.
        plan: with its terms, from `inspect_model` or `patch_model`.
        folder: new or empty.
        recipes: those that the plan was made with.
        progress: called with (done, total, name) after each site.

    Returns:
        The files, and notes on what was not drawn.

    Raises:
        UsageError: matplotlib is missing, or the folder cannot be used.
    """
    check_folder(folder)
    chosen, notes = _choose(plan)
    folder.mkdir(exist_ok=True)
    files = [folder / "ranks.png", folder / "errors.png"]
    save_figure(ranks_figure(plan), files[0])
    save_figure(errors_figure(plan), files[1])
    some = Plan(plan.options, chosen, plan.arch, plan.versions)
    for done, view in enumerate(site_views(model, some, recipes), start=1):
        drawn = _draw_site(view, folder, plan.options.energy)
        files += drawn
        if not drawn:
            notes.append(f"not drawn: {view.site.name or '(the model)'}: {view.note}")
        if progress is not None:
            progress(done, len(chosen), view.site.name)
    return files, notes


def _choose(plan: Plan) -> tuple[list[SitePlan], list[str]]:
    if len(plan.sites) <= MAX_SITES:
        return plan.sites, []
    worst = sorted(plan.sites, key=_loss, reverse=True)[:MAX_SITES]
    kept = {id(site) for site in worst}
    note = (
        f"{len(plan.sites)} sites: only the {MAX_SITES} that lose most have figures of their own; "
        "--include chooses others, and --html shows all"
    )
    return [site for site in plan.sites if id(site) in kept], [note]


def _loss(site: SitePlan) -> float:
    return max((d.attention_error for d in site.decisions), default=-1.0)


def _draw_site(view: SiteView, folder: Path, threshold: float) -> list[Path]:
    name = re.sub(r"[^\w.-]", "_", view.site.name) or "model"
    files = []
    if view.energy is not None:
        files.append(folder / f"{name}.energy.png")
        save_figure(energy_figure(view, threshold), files[-1])
    for start in range(0, view.heads, HEADS_PER_FIGURE):
        heads = range(start, min(start + HEADS_PER_FIGURE, view.heads))
        files.append(folder / f"{name}.heads_{heads[0]}-{heads[-1]}.png")
        save_figure(heads_figure(view, heads), files[-1])
    return files

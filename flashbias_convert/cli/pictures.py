"""``--plot`` and ``--html``: a plan as figures and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .output import Output
from .reports import check_report
from .values import load_recipes

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from torch import nn

    from ..plan import Plan
    from .conversion import Request


@dataclass
class Pictures:
    """What was drawn.

    Attributes:
        figures: PNG files.
        page: the HTML file, if there is one.
    """

    figures: list[Path] = field(default_factory=list)
    page: Path | None = None

    def lines(self) -> list[str]:
        """For people."""
        found = []
        if self.figures:
            found.append(f"drew {len(self.figures)} figures in {self.figures[0].parent}")
        if self.page is not None:
            size = self.page.stat().st_size / 1e6
            found.append(f"wrote {self.page} ({size:.1f} MB): open it in a browser")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; empty where nothing was drawn."""
        found: dict[str, Any] = {}
        if self.figures:
            found["figures"] = [str(path) for path in self.figures]
        if self.page is not None:
            found["html"] = str(self.page)
        return found


def check_pictures(request: Request) -> None:
    """Raise UsageError for a folder or file that cannot be written; before all work."""
    check_report(request.html, sources=[request.checkpoint], force=request.force, option="--html")
    if request.html is not None and request.html.suffix not in (".html", ".htm"):
        raise UsageError(f"the page {request.html} must end in .html")
    if request.plot is None:
        return
    from ..plotting import check_folder

    check_folder(request.plot)
    source = request.checkpoint.resolve()
    if source.is_dir() and request.plot.resolve().is_relative_to(source):
        raise UsageError(
            f"figures in {request.plot} would change the input", "choose another one for --plot"
        )


def draw_pictures(request: Request, output: Output, plan: Plan, model: nn.Module) -> Pictures:
    """Draw what was asked for.

    Raises:
        UsageError: it cannot be written.
    """
    drawn = Pictures()
    recipes = load_recipes(request.recipe_files) if request.plot or request.html else []
    try:
        if request.plot is not None:
            from ..plotting import draw_plan

            with output.progress("drawing", "drawing") as progress:
                drawn.figures, notes = draw_plan(
                    model, plan, request.plot, recipes=recipes, progress=progress
                )
            for note in notes:
                output.note(f"note: {note}")
        if request.html is not None:
            _write_page(request.html, request, output, plan, model, recipes)
            drawn.page = request.html
    except OSError as error:
        raise UsageError(f"the pictures cannot be written: {error.strerror}") from error
    return drawn


def _write_page(
    path: Path, request: Request, output: Output, plan: Plan, model: nn.Module, recipes: Any
) -> None:
    from ..checkpoint.staging import Staging
    from ..report import write_page

    arch = plan.arch or {}
    library = "" if arch.get("library") == "caller" else f"{arch.get('library')}:"
    title = f"{request.checkpoint}: {library}{arch.get('name')}"
    with Staging(request.force) as staging, output.progress("drawing", "drawing") as progress:
        write_page(
            staging.add(path.resolve()),
            model,
            plan,
            title=title,
            recipes=recipes,
            progress=progress,
        )
        staging.commit()

"""One self-contained page: styles, scripts and data in it, and nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from ..plan import Plan
from ..recipe import Recipe
from ..views import site_views
from .data import overview, site_details

Progress = Callable[[int, int, str], None]
#: the page may load nothing, whatever a name in it says
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(
    path: Path,
    model: nn.Module,
    plan: Plan,
    *,
    title: str,
    notes: tuple[str, ...] = (),
    recipes: Iterable[Recipe] = (),
    progress: Progress | None = None,
) -> None:
    """Write a page to look through the sites and heads of a plan.

    Args:
        path: the file; written piece by piece, so that memory stays small.
        model: the one that the plan was made for.
        plan: with its terms, from `inspect_model` or `patch_model`.
        title: the checkpoint and its architecture.
        notes: shown at the top.
        recipes: those that the plan was made with.
        progress: called with (done, total, name) after each site.

    Raises:
        OSError: the file cannot be written.
    """
    total = len(plan.sites)
    with path.open("w", encoding="utf-8") as file:
        file.write(_head(title))
        file.write(_data("overview", overview(plan, title, notes)))
        for number, view in enumerate(site_views(model, plan, recipes)):
            # a script of its own: the browser parses it when the site is looked at
            file.write(_data(f"site-{number}", site_details(view, total)))
            if progress is not None:
                progress(number + 1, total, view.site.name)
        file.write(f"<script>\n{_asset('charts.js')}\n{_asset('page.js')}</script>\n")
        file.write("</body>\n</html>\n")


def _head(title: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n"
        '<body>\n<header id="header"></header>\n<main>\n<section id="list"></section>\n'
        '<section id="details"></section>\n</main>\n'
    )


def _data(name: str, value: Any) -> str:
    # "</script>" in a name must not end the element
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

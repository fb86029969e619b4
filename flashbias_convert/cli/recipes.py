"""``flashbias-convert recipes``: which architectures can be converted."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Output, print_json
from .parameters import DebugOpt, JsonOpt
from .values import load_recipes

if TYPE_CHECKING:
    from ..recipe import Recipe

RecipeFilesOpt = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="Also this file; it is executed. Repeatable.", show_default=False
    ),
]


def recipes(recipe: RecipeFilesOpt = None, json: JsonOpt = False, debug: DebugOpt = False) -> int:
    """List the recipes: the architectures that are known, and which of them can be converted."""
    output = Output(as_json=json)
    from ..recipe import Registry

    found = Registry(tuple(load_recipes(tuple(recipe or ())))).all()
    if json:
        print_json([_data(r) for r in found])
        return 0
    output.result(dict, _table(found))
    return 0


def _data(recipe: Recipe) -> dict[str, Any]:
    installed = _installed(recipe.library)
    return {
        "name": recipe.name,
        "title": recipe.title,
        "converts": recipe.converts,
        "library": recipe.library,
        "tested": recipe.tested,
        "installed": installed,
        "installed_is_tested": _is_tested(recipe.tested, installed),
        "classes": list(recipe.classes),
    }


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _is_tested(tested: str, installed: str | None) -> bool:
    from packaging.specifiers import SpecifierSet

    return installed is not None and SpecifierSet(tested).contains(installed, prereleases=True)


def _table(found: list[Recipe]) -> Any:
    """Without the classes, which make it too wide; `--json` has them."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title in ("name", "converts", "title", "tested with", "installed"):
        table.add_column(title, overflow="fold", no_wrap=title in ("name", "converts"))
    for recipe in found:
        data = _data(recipe)
        mark = "" if data["installed_is_tested"] else " (not tested)"
        table.add_row(
            recipe.name,
            "yes" if recipe.converts else "no",
            recipe.title,
            f"{recipe.library} {recipe.tested}",
            (data["installed"] or "no") + mark,
        )
    return table

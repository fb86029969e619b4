"""What recipes say of a site that the prober found."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..inspection import leave_no_trace, reason_against
from ..inspection.finding import Match, find_site
from ..recipe import Registry


@dataclass(frozen=True)
class Known:
    """See the fields of the same names of `SiteProbe`."""

    recipe: str | None = None
    recipe_site: str | None = None
    refused: str = ""


def known_of(
    model: nn.Module, name: str, registry: Registry, tokens: int, *, biased: bool
) -> Known:
    """Which recipe converts a site: that of its module, or of the nearest module above with one.

    A recipe may replace a whole layer, whose attention is a module within.

    Args:
        model: that was probed.
        name: of the module that attends.
        registry: of the recipes.
        tokens: keys of the call, for recipes that leave their number open.
        biased: the site adds something; else nobody needs to know whether that can be converted.
    """
    recipe = registry.find(model.get_submodule(name))
    while recipe is None and name:
        name = name.rpartition(".")[0]
        recipe = registry.find(model.get_submodule(name))
    if recipe is None:
        return Known()
    if not biased:
        return Known(recipe.name, name) if recipe.converts else Known()
    with leave_no_trace(model):
        against = reason_against(Match(find_site(model, name, recipe, tokens), recipe, (name,)))
    if against is not None:
        return Known(refused=f"{recipe.name}: {against}")
    return Known(recipe.name, name)

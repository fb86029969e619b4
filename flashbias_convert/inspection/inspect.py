"""A dry run: walk a model, find its biased attention sites, and plan what to do with each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..no_site import nothing_found
from ..options import DecomposeOptions, Method
from ..plan import Plan, SitePlan
from ..recipe import Recipe, Registry
from ..selection import Choice
from ..terms import ScoreBias
from .finding import find_sites, refuse_wrapped, shared_owner
from .groups import Progress, plan_together, together
from .planning import plan_site
from .surroundings import leave_no_trace, library_versions

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup


def inspect_model(
    model: nn.Module,
    *,
    energy: float = 0.99,
    method: Method = "auto",
    max_rank: int | None = None,
    max_attention_error: float = 0.25,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    recipes: Iterable[Recipe] = (),
    target: str | None = None,
    tokens: int | None = None,
    fill: bool = True,
    diagonal: bool = False,
    force_all: bool = False,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    keep: Callable[[ScoreBias], ScoreBias] | None = None,
) -> Plan:
    """Plan the conversion of a model; nothing is changed.

    A model that is patched already is planned anew, from its weights.

    Args:
        model: any model whose weights are loaded.
        energy, method, max_rank, max_attention_error, target, tokens, fill, diagonal, force_all:
            see `DecomposeOptions`.
        include: names of sites to convert, exact, or ``re:PATTERN`` matched against the whole
            name; nothing means all.
        exclude: names of sites to leave alone, in the same form; wins over `include`.
        recipes: recipes to use before the installed ones.
        progress: called with (done, total, name) after each site.
        group: processes that share the sites out, each with the same model; all of them call this
            with the same options and get the same plan, which does not depend on their number.
            ``torch.distributed.group.WORLD`` for all. Default: this process does everything.
        keep: called with the terms of each site once it is planned; returns the same terms from
            where they are to wait, such as a file that is memory-mapped. Default: in memory. With
            a `group`, every process calls it for all sites, once all of them are planned.

    Returns:
        A plan with one entry for every site that a recipe matches.

    Raises:
        NothingToConvertError: no module of the model has a recipe.
        UsageError: options that make no sense, an entry of `include` or `exclude` that matches no
            site, a model that is wrapped, or one whose weights are on the meta device.
    """
    options = DecomposeOptions(
        energy=energy,
        method=method,
        max_rank=max_rank,
        max_attention_error=max_attention_error,
        target=target,
        fill=fill,
        diagonal=diagonal,
        force_all=force_all,
        tokens=tokens,
    )
    refuse_wrapped(model)
    registry = Registry(tuple(recipes))
    matches = list(find_sites(model, registry, tokens))
    if not matches:
        raise nothing_found(model, registry)
    names = [name for match in matches for name in match.names]
    chosen = Choice(include, exclude, names)
    with leave_no_trace(model):
        if group is None:
            plans = []
            for match in matches:
                # no name for a plan on its way: it would hold the terms while the next one is made
                against = chosen.reason_against(match.names)
                plans.append(_kept(plan_site(match, options, against), keep))
                if progress is not None:
                    progress(len(plans), len(matches), match.site.name)
        else:
            shared = plan_together(matches, options, chosen, progress, group)
            plans = [_kept(made, keep) for made in shared]
    owners = [shared_owner(match.site, match.recipe) for match in matches]
    return Plan(options, together(owners, plans), versions=library_versions())


def _kept(plan: SitePlan, keep: Callable[[ScoreBias], ScoreBias] | None) -> SitePlan:
    """The plan of a site with its terms where `keep` has put them."""
    if keep is None or plan.bias is None:
        return plan
    return replace(plan, bias=keep(plan.bias))

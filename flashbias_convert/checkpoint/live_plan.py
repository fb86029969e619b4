"""The plan of a model that is patched in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from ..errors import UsageError
from ..inspection import library_versions
from ..options import DecomposeOptions
from ..patched_attention import PatchedAttention
from ..plan import Plan, SitePlan
from ..recipe import Recipe, Registry


def live_plan(model: nn.Module, plan: Plan | None, recipes: Iterable[Recipe] = ()) -> Plan:
    """What is patched now, with the reasons and errors that `plan` gives for it.

    Args:
        model: a patched model.
        plan: what `patch_model` returned, or None for what the modules themselves know.
        recipes: recipes beside the installed ones.

    Raises:
        UsageError: nothing is patched, or `plan` patches other modules than these.
        StaleTermsError: weights have changed since they were patched.
    """
    modules = {n: m for n, m in model.named_modules() if isinstance(m, PatchedAttention)}
    if not modules:
        raise UsageError("no module of this model is patched", "call patch_model first")
    for module in modules.values():
        module.check_fresh(by_values=True)
    if plan is None:
        registry = Registry(tuple(recipes))
        sites = [_bare_site(name, module, registry) for name, module in modules.items()]
        return Plan(DecomposeOptions(), sites, versions=library_versions())
    if {site.name for site in plan.patched} != set(modules):
        raise UsageError(
            "the plan and the model disagree on what is patched", "pass what patch_model returned"
        )
    sites = [
        dataclasses.replace(site, spec=modules[site.name].score_bias.spec())
        if site.name in modules
        else site
        for site in plan.sites
    ]
    return dataclasses.replace(plan, sites=sites)


def _bare_site(name: str, module: PatchedAttention, registry: Registry) -> SitePlan:
    recipe = registry.find(module)
    if recipe is None:
        raise UsageError(
            f"no recipe is known for {module.original_class.__name__}", "pass it in recipes="
        )
    spec = module.score_bias.spec()
    heads = int(spec["num_heads"])
    return SitePlan(name, recipe.name, "patched", "patched in memory", heads=heads, spec=spec)

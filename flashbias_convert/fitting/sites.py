"""Fit factor networks to the sites of a model whose biases depend on the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..decompose.neural_options import FitOptions
from ..errors import NothingToConvertError, UsageError
from ..inputs import Batch, as_inputs
from ..inspection import (
    NEEDS_FIT,
    find_site,
    inspect_model,
    shared_owner,
    together,
)
from ..plan import Plan, SitePlan
from ..recipe import Recipe, Registry
from ..shares import each
from ..swap import restored, unpatch_all
from .site_fit import NOT_REACHED, NOT_SERVING, Progress, SiteFit

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup


def fit_sites(
    model: nn.Module,
    inputs: Any,
    *,
    rank: int = 96,
    options: FitOptions | None = None,
    calls: int = 64,
    tokens_per_step: int = 384,
    from_tokens: int | None = None,
    device: torch.device | str | None = None,
    state: str | Path | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    recipes: Iterable[Recipe] = (),
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    **planning: Any,
) -> Plan:
    """Plan a model whose biases depend on the input; nothing is changed.

    For every chosen site of that kind, the model runs on the inputs, its recipe says what each
    call saw, and two small networks of the site's own token features are fitted to the bias
    (FlashBias, section 3.2). Only they are trained. What they lose is measured on inputs that were
    not trained on: one in eight, or, where there is only one input, on that one, with a warning.
    Other sites are planned as `inspect_model` does.

    Args:
        model: in evaluation mode, not patched, or patched (it is planned anew).
        inputs: see `verify_model`; all of them are kept in memory.
        rank: R of every head; 96 in the paper.
        options: how to fit, and what to ask of a fit.
        calls: samples (calls of the site, entry by entry of the batch) that are kept per site.
        tokens_per_step: of longer samples a random choice of so many tokens enters a step.
        from_tokens: calls with so many tokens are served by the networks, and shorter ones by the
            bias as it is, where a site can do both. None takes the length from which on networks
            are faster, by measurements on Hopper (`decompose.pair_forms`). Where that is no length,
            or one that none of the inputs has, the fit says whether networks hold, and the bias as
            it is serves. A site whose recipe does not say what its bias is made of is served by
            networks at all lengths.
        device: where networks are trained; default where the model is.
        state: a folder that keeps the fits, so that an interrupted one goes on.
        include, exclude, recipes: see `inspect_model`.
        progress: called after every check.
        group: processes that share sites out, see `inspect_model`; each has the same model and the
            same inputs, and fits every P-th site. A folder for `state` is one that all of them see.
        **planning: other keyword arguments of `inspect_model`, for the other sites.

    Returns:
        A plan for `apply_plan`. A site whose fit misses what was asked is left alone, and says so;
        so does one whose networks hold, but are slower, and that stays exact.

    Raises:
        UsageError: no inputs, a model in training mode, or options that make no sense.
        NothingToConvertError: no chosen site has a bias that depends on the input.
    """
    options = options or FitOptions()
    asked = {"rank": rank, "calls": calls, "tokens_per_step": tokens_per_step}
    for name, value in {**asked, "from_tokens": from_tokens}.items():
        if value is None and name == "from_tokens":
            continue
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} must be a positive integer, got {value!r}")
    if model.training:
        raise UsageError("a fit needs the model in evaluation mode", "call model.eval() first")
    recipes = tuple(recipes)
    plan = inspect_model(
        model, include=include, exclude=exclude, recipes=recipes, group=group, **planning
    )
    registry = Registry(recipes)
    dynamic = [site for site in plan.sites if _can_be_fitted(model, site, registry)]
    if not dynamic:
        raise NothingToConvertError(
            "no chosen site has a bias that depends on the input",
            "other sites are converted without a fit: flashbias-convert convert",
        )
    batches = [_as_here(batch, model) for batch in as_inputs(inputs, model=model).batches]
    if not batches:
        raise UsageError("there are no inputs to fit to")
    folder = _folder(state)
    with restored(model, always=True):
        unpatch_all(model)

        def fitted_site(site: SitePlan) -> SitePlan:
            fitter = SiteFit(model, site, registry, options, rank, tokens_per_step, from_tokens)
            where = None if folder is None else folder / f"{site.name or 'model'}.fit"
            made = fitter.run(batches, calls, device, where, progress)
            return made if group is None else _on("cpu", made)

        fits = each([partial(fitted_site, site) for site in dynamic], group)
        if group is not None:  # results are sent as tensors of the CPU
            fits = [_on(next(model.parameters()).device, site) for site in fits]
        fitted = {site.name: site for site in fits}
        sites = [fitted.get(site.name, site) for site in plan.sites]
        sites = together([_owner(model, site, registry) for site in sites], sites)
    return dataclasses.replace(plan, sites=sites)


def _can_be_fitted(model: nn.Module, site: SitePlan, registry: Registry) -> bool:
    """Whether a chosen site needs a fit, or could do with its bias as it is and have one."""
    if site.reason == NEEDS_FIT:
        return True
    recipe = registry.find(model.get_submodule(site.name))
    return site.status == "patched" and recipe is not None and recipe.observe is not None


def _owner(model: nn.Module, site: SitePlan, registry: Registry) -> nn.Module | None:
    recipe = registry.find(model.get_submodule(site.name))
    if recipe is None:
        return None
    return shared_owner(find_site(model, site.name, recipe), recipe)


def kept(plan: Plan) -> list[SitePlan]:
    """The sites of a plan whose fit is good enough, and whose bias as it is serves faster."""
    return [site for site in plan.sites if NOT_SERVING in site.reason]


def missed(plan: Plan) -> list[SitePlan]:
    """The sites of a plan whose fit is not good enough."""
    return [site for site in plan.sites if site.reason.startswith(NOT_REACHED)]


def _folder(state: str | Path | None) -> Path | None:
    if state is None:
        return None
    try:
        Path(state).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {state} for fits cannot be made: {error}") from error
    return Path(state)


def _on(device: torch.device | str, site: SitePlan) -> SitePlan:
    bias = None if site.bias is None else site.bias.to(device)
    return dataclasses.replace(site, bias=bias)


def _as_here(batch: Batch, model: nn.Module) -> Batch:
    parameter = next(model.parameters())
    return batch.to(parameter.device, parameter.dtype)

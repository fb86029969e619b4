"""Convert the attention modules of a model in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .builder_module import BuilderModule
from .builders import modules_from_spec
from .errors import UsageError
from .hooks import at_hand
from .inspection import inspect_model, refuse_wrapped
from .patched_attention import PatchedAttention
from .plan import Plan, SitePlan
from .recipe import Recipe, Registry
from .swap import (
    device_of,
    patch_module,
    patch_owner,
    patched_modules,
    refuse_trained,
    restored,
    unpatch_all,
)
from .terms import ScoreBias
from .training_plan import Train, check_train, mark_trained


def patch_model(
    model: nn.Module, *, backend: str = "auto", train: Train = None, **options: Any
) -> Plan:
    """Convert a model in place.

    The last call wins: sites that an earlier call patched are planned anew from their weights,
    and are no longer patched if this call leaves them alone. In training mode patched modules
    run their original forward, unless their terms are trained.

    With ``train="terms"``, the floating-point tensors of the terms become fp32 parameters of the
    model, initialised from the decomposition; integers stay buffers. Patched modules then run
    with them in training, too, and never again as the original: its own bias, whose parameters
    no longer ask for gradients, is not what was trained. Sites without such tensors (see their
    warnings in the plan) are trained through the original forward. A state dict or `save_model`
    keeps what was learnt, and `load_model` brings it back, ready to be trained further; to serve
    it, see `freeze_terms`.

    Args:
        model: any model whose weights are loaded; patch it before you compile or wrap it.
        backend: "auto", "triton", "sdpa" or "eager", see `flashbias_attention`.
        train: "terms", or None.
        **options: keyword arguments of `inspect_model`.

    Returns:
        The plan, with one entry for every site. A site that failed stayed as it was. A warning
        says so, and why, if that is true of all.

    Raises:
        NothingToConvertError, UsageError: see `inspect_model`; the model is as it was. So it is
            if terms were trained before, which would be lost, if there are none to train, or if
            a site drops attention weights in training, which the fused path cannot do.
    """
    check_train(train)
    refuse_trained(model)
    plan = inspect_model(model, **options)
    apply_plan(model, plan, recipes=options.get("recipes", ()), backend=backend, train=train)
    if not plan.patched:
        warnings.warn(f"nothing was converted: {plan.why_nothing()}", stacklevel=2)
    return plan


def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    recipes: Iterable[Recipe] = (),
    backend: str = "auto",
    empty: bool = False,
    train: Train = None,
) -> None:
    """Patch the sites of a plan, and only those; after an exception the model is as it was.

    Args:
        model: the model that the plan was made for, or one built like it.
        plan: from `inspect_model` or, with `empty`, from a file.
        recipes: recipes to use before the installed ones.
        backend: see `flashbias_attention`.
        empty: allocate the terms that the plan describes and leave it to `load_state_dict` to
            fill them; until then patched modules refuse to compute.
        train: "terms" makes them parameters, see `patch_model`, and the plan says so from then
            on; None leaves it to the plan.

    Raises:
        UsageError: the plan does not fit the model, holds no terms, or the model is wrapped; or
            see `patch_model`.
    """
    check_train(train)
    refuse_wrapped(model)
    refuse_trained(model)
    if train == "terms":
        mark_trained(plan)
    registry = Registry(tuple(recipes))
    with restored(model, always=False):
        unpatch_all(model)
        for site in plan.patched:
            _apply_site(model, site, registry, backend, empty)
        _apply_owners(model, registry)


def _apply_site(
    model: nn.Module, site: SitePlan, registry: Registry, backend: str, empty: bool
) -> None:
    try:
        module = model.get_submodule(site.name)
    except AttributeError as error:
        raise UsageError(
            f"the plan names {site.name!r}, which this model does not have",
            "build the model with the arguments that it was converted with",
        ) from error
    recipe = registry.find(module)
    if recipe is None or recipe.name != site.recipe:
        raise UsageError(
            f"the plan wants recipe {site.recipe!r} for {site.name!r}, but "
            f"{type(module).__name__} has {recipe.name if recipe else 'none'}",
            "pass the recipe that it was converted with: recipes=[load_recipe_file(...)]",
        )
    with at_hand([module]):  # the terms of a plan from a file are made where the weights are
        _apply_at_hand(module, site, recipe, backend, empty)


def _apply_at_hand(
    module: nn.Module, site: SitePlan, recipe: Recipe, backend: str, empty: bool
) -> None:
    bias = _placeholder(module, site) if empty else site.bias
    if bias is None or (site.builder_modules() and not empty and site.modules is None):
        raise UsageError(
            f"the plan holds no terms for {site.name!r}", "use empty=True for a plan from a file"
        )
    try:
        patch_module(
            module,
            recipe.attention,
            bias,
            backend=backend,
            builders=site.builders(),
            modules=_empty_modules(module, site) if empty else site.modules,
            awaits_load=empty,
            trained=site.trains_terms(),
        )
    except UsageError as error:
        raise UsageError(f"{site.name}: {error.message}", error.hint) from error


def _apply_owners(model: nn.Module, registry: Registry) -> None:
    """Patch the modules above that make the biases of the patched ones."""
    recipes = {registry.find(module) for module in patched_modules(model)}
    owners = [(recipe, owner) for recipe in recipes if recipe for owner in recipe.owners]
    for name, module in list(model.named_modules()):
        for recipe, owner in owners:
            if not owner.matches(module) or not patched_modules(module):
                continue
            below = [m for m in module.modules() if registry.find(m) is recipe and recipe.shares(m)]
            _require_together(name, below, alone=owner is not recipe.owners[0])
            try:
                patch_owner(module, owner.patch)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from error


def _require_together(name: str, below: Sequence[nn.Module], *, alone: bool) -> None:
    """Raise UsageError unless all modules below an owner are patched, and trained, alike."""
    patched = [module for module in below if isinstance(module, PatchedAttention)]
    if len(patched) < len(below) and not alone:
        raise UsageError(f"{name}: its attention modules can only be patched together")
    if len({module.trains_terms for module in patched}) > 1:
        raise UsageError(f"{name}: the terms of its attention modules can only be trained together")


def _placeholder(module: nn.Module, site: SitePlan) -> ScoreBias | None:
    if site.spec is None:
        return None
    return ScoreBias.empty_from_spec(site.spec, device=device_of(module))


def _empty_modules(module: nn.Module, site: SitePlan) -> dict[str, BuilderModule]:
    return modules_from_spec(site.spec or {}, device=device_of(module))


def unpatch_model(model: nn.Module, *, discard_trained: bool = False) -> int:
    """Give every patched module its original class back and drop its terms.

    Args:
        model: a patched model.
        discard_trained: drop terms that were trained, too. Nothing else knows what they have
            learnt: the original's bias is that of before the training, while everything that was
            trained beside the terms stays as it is.

    Returns:
        How many modules were patched.

    Raises:
        UsageError: terms were trained, and may not be dropped.
    """
    if not discard_trained:
        refuse_trained(model)
    return unpatch_all(model)


def freeze_terms(model: nn.Module) -> int:
    """Stop the training of terms: their parameters become buffers, with the numbers of now.

    What the kernels read is then made once, and not in every call. Patched modules run with these
    terms in training mode, too; a file of the model loads with parameters again.

    Returns:
        How many modules have terms that were trained.
    """
    found = [module for module in patched_modules(model) if module.trains_terms]
    for module in found:
        module.score_bias.freeze()
        module.score_bias.prepare(module.head_by_head)
    return len(found)


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[Plan]:
    """Patch a model for the length of a ``with`` block; see `patch_model` for the options.

    On leaving, with or without an exception, the model is as it was before: not patched, or
    patched with the terms that it had. Terms cannot be trained so: they would be forgotten.
    """
    if options.get("train") is not None:
        raise UsageError(
            "patched() forgets its terms on leaving, and with them what was trained",
            "use patch_model",
        )
    with restored(model, always=True):
        yield patch_model(model, **options)

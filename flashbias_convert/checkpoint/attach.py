"""Patch an original model with terms that a state dict held beside its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from ..errors import CheckpointError, FlashBiasError
from ..plan import Plan
from ..recipe import Recipe
from .check_terms import DAMAGE, check_terms
from .healthy import check_loaded
from .kept_terms import plan_of_terms


def attach_terms(
    model: nn.Module,
    terms: Mapping[str, Tensor],
    path: str | Path,
    recipes: Iterable[Recipe] = (),
    backend: str = "auto",
) -> Plan:
    """Patch `model` in place; its weights are loaded and stay as they are.

    Args:
        model: the original model.
        terms: the second part of `kept_terms.split_terms`, with the dtypes that they keep.
        path: where they came from, for messages.
        recipes: recipes beside the installed ones.
        backend: see `flashbias_attention`.

    Returns:
        What is patched; it does not say why.

    Raises:
        CheckpointError: damaged or stale terms, or of another model.
    """
    from ..patching import apply_plan

    recipes = tuple(recipes)
    plan = plan_of_terms(terms, path, model, recipes)
    check_terms(plan, terms)
    try:
        apply_plan(model, plan, recipes=recipes, backend=backend, empty=True)
        lost = model.load_state_dict(terms, strict=False).unexpected_keys
    except FlashBiasError:
        raise
    except DAMAGE as error:
        raise CheckpointError(f"the terms in {path} cannot be used: {error!r}") from error
    if lost:
        raise CheckpointError(f"the model has no place for {lost[0]!r} of {path}")
    check_loaded(model, path)
    return plan

"""Which sites of a plan train their terms."""

from __future__ import annotations

from typing import Literal

from .builders import with_builders
from .errors import UsageError
from .plan import Plan, SitePlan
from .trained_terms import can_learn, in_full_precision

#: what `patch_model` trains: the terms, or (None) nothing of its own
Train = Literal["terms"] | None

#: what the plan says of a site that stays out
NOTHING_TO_TRAIN = "it has no terms to train: in training mode its original forward runs"


def check_train(train: object) -> None:
    """Raise UsageError unless `train` is a value of `Train`."""
    if train is not None and train != "terms":
        raise UsageError(f'train must be "terms" or None, got {train!r}')


def mark_trained(plan: Plan) -> None:
    """Write into a plan, in place, that the terms of its patched sites are parameters.

    What it says of energies and errors is then true of the start. Networks that make terms from
    the input, and terms without a tensor of floating point, are no parameters; their sites get a
    warning.

    Raises:
        UsageError: no patched site has terms to train, or the plan holds no terms.
    """
    if not plan.patched:
        raise UsageError(f"there are no terms to train: {plan.why_nothing()}")
    learning = [site for site in plan.patched if _has_terms(site)]
    if not learning:
        raise UsageError(
            "no site has terms that could be trained",
            "biases are zeros, as of fresh weights, or made from the model's own weights in each "
            "call: train without train=",
        )
    for site in plan.patched:
        if site not in learning and NOTHING_TO_TRAIN not in site.warnings:
            site.warnings = (*site.warnings, NOTHING_TO_TRAIN)
    for site in learning:
        assert site.bias is not None
        if not site.trains_terms():
            site.reason += "; trained from there"
        site.bias = in_full_precision(site.bias)
        site.spec = with_builders(site.bias.spec(), site.builders(), site.modules, trained=True)


def _has_terms(site: SitePlan) -> bool:
    if site.bias is None:
        raise UsageError(
            f"the plan holds no terms for {site.name!r}", "use the plan that inspect_model made"
        )
    return not site.builder_modules() and any(can_learn(term) for term in site.bias.terms)


__all__ = ["NOTHING_TO_TRAIN", "Train", "check_train", "mark_trained"]

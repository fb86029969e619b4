"""What to do with one site."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from torch import nn

from ..builders import with_builders
from ..decompose import Decomposition, decompose, expected_gain
from ..decompose.gain import is_paired
from ..decompose.pair_forms import PairForm, PairSite, forms, forms_in_words
from ..errors import FlashBiasError, NotFiniteError, UsageError
from ..hooks import at_hand, children_read, is_dispatched, loads_all_below
from ..options import DecomposeOptions
from ..plan import SitePlan
from ..recipe import Description, LeftAlone, Recipe, Site, UnsupportedSite
from ..swap import original_class, owner_refusal, refusal
from ..terms import ScoreBias
from .cautions import cautions
from .finding import Match

logger = logging.getLogger(__name__)


#: why a site with a dynamic bias is left alone
NEEDS_FIT = "its bias depends on the input: fit factor networks to it, flashbias-convert fit"


def plan_site(match: Match, options: DecomposeOptions, against: str | None) -> SitePlan:
    """Decide over one site; whatever goes wrong there is told in its plan.

    Args:
        match: the site.
        options: see `DecomposeOptions`.
        against: why the caller does not want it, or None.

    Raises:
        UsageError: an option that suits no site at all.
    """
    site, recipe = match.site, match.recipe
    plan = SitePlan(site.name, recipe.name, "left alone", against or "", warnings=cautions(match))
    if against is not None:
        return plan
    reason = _in_the_way(match)
    if reason is not None:
        return replace(plan, status="unsupported", reason=reason)
    try:
        with at_hand(_read_by(match)):
            _refuse_meta(site)
            description = recipe.describe(site)
            plan = _with_sizes(plan, description)
            return _decide(plan, description, options)
    except LeftAlone as error:
        return replace(plan, reason=str(error))
    except UnsupportedSite as error:
        return replace(plan, status="unsupported", reason=str(error))
    except UsageError:
        raise  # an option that suits no site at all
    except FlashBiasError as error:
        damaged = isinstance(error, NotFiniteError)
        return replace(plan, status="failed", reason=str(error), not_finite=damaged)
    except Exception as error:  # one broken site must not stop the others
        logger.debug("site %s failed", site.name, exc_info=True)
        return replace(plan, status="failed", reason=f"{type(error).__name__}: {error}")


def reason_against(match: Match) -> str | None:
    """Why a site would not be converted, whatever the options; None if it could be."""
    reason = _in_the_way(match)
    if reason is not None:
        return reason
    try:
        with at_hand(_read_by(match)):
            match.recipe.describe(match.site)
    except (LeftAlone, UnsupportedSite, FlashBiasError) as error:
        return str(error)
    except Exception as error:  # as in a plan
        return f"{type(error).__name__}: {error}"
    return None


def _in_the_way(match: Match) -> str | None:
    """Why a site cannot be patched, whatever its bias is."""
    module = match.site.module
    reason = refusal(module) or _own_forward(module, match.recipe) or _no_owner(match)
    return reason or _no_place(match.site)


def _no_place(site: Site) -> str | None:
    """Where accelerate moves every buffer below a module by its name, terms have nowhere to be."""
    path = site.name.split(".") if site.name else []
    above = [site.root.get_submodule(".".join(path[:i])) for i in range(len(path) + 1)]
    if any(loads_all_below(module) for module in above):
        return "accelerate offloads its buffers in one block; patch before you dispatch the model"
    return None


def _read_by(match: Match) -> list[nn.Module]:
    """The modules whose weights `describe` may read."""
    owner, found = match.site.owner, [match.site.module]
    if owner is not None and match.recipe.owners:
        found += children_read(owner, match.recipe.owners[0].patch.reads)
    return found


def _own_forward(module: nn.Module, recipe: Recipe) -> str | None:
    """A subclass with a forward of its own computes something that the recipe does not know."""
    for cls in original_class(module).__mro__:
        if recipe.knows(cls):
            return None
        if "forward" in vars(cls):
            return f"its class {cls.__name__} overrides the forward that the recipe replaces"
    return None


def _no_owner(match: Match) -> str | None:
    """Why the owner of a site stands in the way, or None."""
    if not match.recipe.owners:
        return None
    if match.site.owner is None:
        if not match.recipe.owners[0].required:
            return None
        names = [cls.rpartition(".")[2] for cls in match.recipe.owners[0].classes]
        return f"its bias is made by a {' or '.join(names)}, which is not part of this model"
    reason = owner_refusal(match.site.owner)
    return reason and f"its {original_class(match.site.owner).__name__}: {reason}"


def _refuse_meta(site: Site) -> None:
    tensors = [*site.module.parameters(), *site.module.buffers()]
    if not any(t.is_meta for t in tensors):
        return
    if is_dispatched(site.module):
        raise UnsupportedSite("accelerate keeps its weights where they cannot be read")
    raise UsageError(
        f"the weights of {site.name!r} are on the meta device", "load the weights first"
    )


def _with_sizes(plan: SitePlan, description: Description) -> SitePlan:
    return replace(
        plan,
        n=description.n,
        m=description.m,
        heads=description.num_heads,
        head_dim=description.head_dim,
        warnings=plan.warnings + description.warnings,
    )


def _decide(plan: SitePlan, description: Description, options: DecomposeOptions) -> SitePlan:
    if description.depends_on_input and not description.builders:
        return replace(plan, reason=NEEDS_FIT)
    if description.not_worth and options.method == "auto" and not options.force_all:
        return replace(plan, reason=description.not_worth)
    result = Decomposition(ScoreBias((), description.num_heads), ())
    if description.bias is not None:
        result = decompose(
            description.bias,
            options,
            name=plan.name,
            index=description.index,
            head_dim=description.head_dim,
            shared=description.shared,
        )
    _check_exact(description)
    plan = replace(plan, decisions=result.decisions)
    if result.left_alone is not None:
        return replace(plan, status="left alone", reason=result.left_alone)
    bias = result.bias + ScoreBias(description.exact_terms, description.num_heads)
    return replace(
        plan,
        status="patched",
        reason=_summary(result, description),
        gain=_gain(result, description),
        forms=_forms(description),
        spec=with_builders(bias.spec(), description.builders),
        bias=bias,
    )


def _check_exact(description: Description) -> None:
    """Raise NotFiniteError for NaN in a term that a recipe made; a mask may be infinite."""
    for term in description.exact_terms:
        for name, tensor in term.tensors().items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise NotFiniteError(f"{name} of its {term.kind} holds NaN", "is a weight broken?")


def _gain(result: Decomposition, description: Description) -> float | None:
    if description.builders:
        return None
    masks = [term.kind for term in description.exact_terms]
    sizes = description.n, description.m, description.head_dim
    paired = is_paired(result.bias.terms)
    return expected_gain(result.decisions, masks, *sizes, description.shared, paired)


def _forms(description: Description) -> tuple[PairForm, ...]:
    """What else a bias could be that is served as it is, but need not."""
    if not description.depends_on_input:
        return ()
    return forms(description.n, description.m, pair_site(description))


def pair_site(description: Description) -> PairSite:
    """What the costs of a bias depend on that is made anew in each call."""
    return PairSite(description.num_heads, description.head_dim, description.pairs)


def _summary(result: Decomposition, description: Description) -> str:
    """What was chosen, in one line: "low_rank in 5 heads (rank 3 to 12), regions"."""
    parts = []
    for term, count in Counter(d.term for d in result.decisions).items():
        ranks = [d.rank for d in result.decisions if d.term == term and d.rank is not None]
        rank = ""
        if ranks:
            low, high = min(ranks), max(ranks)
            rank = f" (rank {low})" if low == high else f" (rank {low} to {high})"
        what = "no term needed" if term == "none" else term
        parts.append(f"{what} in {count} head{'s' if count > 1 else ''}{rank}")
    parts += [term.kind for term in description.exact_terms]
    parts += [f"{name} in each call" for name in description.builders]
    chosen = ", ".join(parts) or "no bias"
    if description.depends_on_input:  # it could have factors, too
        words = forms_in_words(description.n, description.m, pair_site(description))
        return f"{chosen}: {words}"
    return chosen

"""What there is to see of a site: its bias, what its terms make of it, and its spectrum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .decompose import cumulative_energy, row_center, spectrum
from .errors import FlashBiasError
from .inspection import leave_no_trace, owner_of
from .plan import Plan, SitePlan
from .recipe import Description, LeftAlone, Recipe, Registry, Site, UnsupportedSite
from .terms import ScoreBias

#: entries (H * N * M) of the largest bias that is looked at
MAX_CELLS = 2**27


@dataclass(frozen=True, eq=False)
class SiteView:
    """A site, and what can be drawn of it.

    Rows are centred, in float32: softmax does not see what is constant along a row.

    Attributes:
        site: what was decided.
        bias: the original's bias without masks, shape (H, N, M); None where there is nothing to
            draw.
        approximation: the same from the terms; None where the site has none.
        energy: share of the energy that the first 1, 2, ... singular values hold, float64,
            shape (H, min(N, M)); None without a bias that was decomposed.
        note: what the viewer should know.
    """

    site: SitePlan
    bias: Tensor | None = None
    approximation: Tensor | None = None
    energy: Tensor | None = None
    note: str = ""

    @property
    def heads(self) -> int:
        """How many heads can be drawn."""
        return 0 if self.bias is None else int(self.bias.shape[0])

    def residual(self) -> Tensor | None:
        """What the terms miss, shape (H, N, M)."""
        if self.bias is None or self.approximation is None:
            return None
        return self.bias - self.approximation


def site_views(model: nn.Module, plan: Plan, recipes: Iterable[Recipe] = ()) -> Iterator[SiteView]:
    """One view per site of a plan, in order, made when it is asked for.

    Args:
        model: the one that the plan was made for, patched or not.
        plan: from `inspect_model` or `patch_model`; its sites hold their terms.
        recipes: those that the plan was made with.
    """
    registry = Registry(tuple(recipes))
    for site in plan.sites:
        with leave_no_trace(model.get_submodule(site.name)):
            view = _view(model, site, registry, plan.options.tokens)
        yield view


def _view(model: nn.Module, site: SitePlan, registry: Registry, tokens: int | None) -> SiteView:
    module = model.get_submodule(site.name)
    recipe = registry.find(module)
    if site.status not in ("patched", "left alone") or recipe is None:
        return SiteView(site, note=f"{site.status}: {site.reason}")
    try:
        owner = owner_of(model, site.name, recipe)
        description = recipe.describe(Site(site.name, module, model, tokens, owner))
    except LeftAlone as error:
        return SiteView(site, note=str(error))
    except (UnsupportedSite, FlashBiasError, RuntimeError, ValueError) as error:
        return SiteView(site, note=f"its bias cannot be computed: {error}")
    cells = description.num_heads * description.n * description.m
    if cells > MAX_CELLS:
        return SiteView(site, note=f"{description.n} x {description.m} is too large to draw")
    if description.bias is None:
        return _closed_form(site, description)
    return _decomposed(site, description, description.bias)


def _closed_form(site: SitePlan, description: Description) -> SiteView:
    if description.depends_on_input:
        return SiteView(site, note="its bias depends on the input")
    if not description.exact_terms:
        made = "its bias is made in each call" if description.builders else "there is no bias"
        return SiteView(site, note=made)
    terms = ScoreBias(description.exact_terms, description.num_heads)
    flat = _flat(row_center(terms.dense(description.n, description.m)))
    shown = flat[0].cpu()
    return SiteView(
        site, shown, shown, note=_joined("closed form, nothing is lost", _which(0, flat))
    )


def _decomposed(site: SitePlan, description: Description, bias: Tensor) -> SiteView:
    if not bool(bias.isfinite().all()):
        return SiteView(site, note="the bias holds NaN or infinity")
    flat, approximation, at = _flat(row_center(bias.detach().float())), None, 0
    if site.bias is not None:
        count = len(site.bias.terms) - len(description.exact_terms)
        terms = ScoreBias(site.bias.terms[:count], site.bias.num_heads).to(bias.device)
        dense = terms.dense(*bias.shape[-2:], device=bias.device)
        every = _flat(row_center(dense.expand(bias.shape)))
        at = int((flat - every).square().mean((-3, -2, -1)).argmax())  # the one that loses most
        approximation = every[at].cpu()
    energy = cumulative_energy(spectrum(flat[at])).cpu()
    return SiteView(site, flat[at].cpu(), approximation, energy, _which(at, flat))


def _flat(bias: Tensor) -> Tensor:
    """(*batch, H, N, M) -> (B, H, N, M)."""
    return bias.reshape(-1, *bias.shape[-3:])


def _which(at: int, flat: Tensor) -> str:
    return "" if len(flat) == 1 else f"entry {at} of a batch of {len(flat)}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)

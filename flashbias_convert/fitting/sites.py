"""Fit factor networks to the sites of a model whose biases depend on the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..builders import with_builders
from ..decompose.decision import HeadDecision
from ..decompose.factor_networks import FactorNetworks
from ..decompose.neural import Check, FitResult, fit
from ..decompose.neural_options import FitOptions
from ..decompose.neural_samples import Sample
from ..decompose.pair_forms import STARTS, PairSite, forms, networks_in_words
from ..errors import DecompositionError, NothingToConvertError, UsageError
from ..inputs import Batch, as_inputs
from ..inspection import (
    NEEDS_FIT,
    find_site,
    inspect_model,
    leave_no_trace,
    shared_owner,
    together,
)
from ..plan import Plan, SitePlan, Status
from ..recipe import Description, Recipe, Registry
from ..shares import each
from ..swap import restored, unpatch_all
from ..terms import ScoreBias
from .collect import Collected, collect, cropped

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

#: called with the name of a site after every look at its fit
Progress = Callable[[str, Check], None]

#: beginning of the reason of a site whose fit is not good enough
NOT_REACHED = "the fit did not reach what was asked"


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
            are faster, by measurements on Hopper (`decompose.pair_forms`): a site where they are at
            no length is not fitted, and keeps its bias; one whose recipe does not say what its bias
            is made of is served by networks at all lengths.
        device: where networks are trained; default where the model is.
        state: a folder that keeps the fits, so that an interrupted one goes on.
        include, exclude, recipes: see `inspect_model`.
        progress: called after every check.
        group: processes that share sites out, see `inspect_model`; each has the same model and the
            same inputs, and fits every P-th site. A folder for `state` is one that all of them see.
        **planning: other keyword arguments of `inspect_model`, for the other sites.

    Returns:
        A plan for `apply_plan`. A site whose fit misses what was asked is left alone, and says so;
        so does one that is not fitted since networks would be slower, and that stays exact.

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
            fitter = _Fitter(model, site, registry, options, rank, tokens_per_step, from_tokens)
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


def _pair_site(description: Description) -> PairSite:
    return PairSite(description.num_heads, description.head_dim, description.pairs)


def _can_be_fitted(model: nn.Module, site: SitePlan, registry: Registry) -> bool:
    """Whether a chosen site needs a fit, or could do with its bias as it is and have one."""
    if site.reason == NEEDS_FIT:
        return True
    recipe = registry.find(model.get_submodule(site.name))
    return site.status == "patched" and recipe is not None and recipe.observe is not None


def _unfitted(site: SitePlan, reason: str, status: Status = "left alone") -> SitePlan:
    """A site without networks: nothing of what it was planned with before the fit stays.

    A site that serves its bias as it is was planned as patched; whoever asks for a fit and does
    not get it shall not find it converted to something else.
    """
    return dataclasses.replace(
        site,
        status=status,
        reason=reason,
        decisions=(),
        gain=None,
        spec=None,
        bias=None,
        modules=None,
    )


def _owner(model: nn.Module, site: SitePlan, registry: Registry) -> nn.Module | None:
    recipe = registry.find(model.get_submodule(site.name))
    if recipe is None:
        return None
    return shared_owner(find_site(model, site.name, recipe), recipe)


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


def _told(sample: Sample) -> str:
    """What tells a sample from others, as far as sums do."""
    return f"{float(sample.bias.double().sum())!r}, {float(sample.x_q.double().sum())!r}"


@dataclasses.dataclass(frozen=True)
class _Fitter:
    """One site, and how to fit it."""

    model: nn.Module
    site: SitePlan
    registry: Registry
    options: FitOptions
    rank: int
    tokens: int
    from_tokens: int | None = None

    def run(
        self,
        batches: Sequence[Batch],
        calls: int,
        device: torch.device | str | None,
        state: Path | None,
        progress: Progress | None,
    ) -> SitePlan:
        """The site as planned, left alone or failed."""
        module = self.model.get_submodule(self.site.name)
        recipe = self.registry.find(module)
        if recipe is None or recipe.observe is None:
            reason = f"recipe {self.site.recipe} does not say what a fit needs"
            return _unfitted(self.site, reason, "unsupported")
        description = self._described(recipe)
        start = self._start(description)
        if start is None:
            return dataclasses.replace(self.site, reason=f"{self.site.reason}; {self._too_slow()}")
        attention = self.options.loss == "attention"
        found = collect(
            self.model, module, recipe.observe, batches, most=calls, attention=attention
        )
        if not found.samples:
            return _unfitted(self.site, "it did not run on these inputs")
        train, judges, apart = found.split()
        here = torch.device(device) if device is not None else train[0].bias.device
        try:
            for sample in found.samples:
                sample.check(self.site.heads)
            result = fit(
                cropped([sample.to(here) for sample in train], self.tokens),
                rank=self.rank,
                heads=self.site.heads,
                options=self.options,
                evaluation=judges,
                device=here,
                state=state,
                data=(f"{self.tokens} tokens", *map(_told, train)),
                progress=None if progress is None else lambda c: progress(self.site.name, c),
            )
        except DecompositionError as error:
            return _unfitted(self.site, str(error), "failed")
        result.networks.from_tokens = start
        return self._planned(result, found, apart, description)

    def _described(self, recipe: Recipe) -> Description:
        with leave_no_trace(self.model):
            return recipe.describe(find_site(self.model, self.site.name, recipe))

    def _start(self, description: Description) -> int | None:
        """How many tokens a call has at least that networks serve; None if they are not worth it.

        Only what can serve its bias as it is has a choice, and only where costs are known.
        """
        if not description.builders:
            return 1
        if self.from_tokens is not None:
            return self.from_tokens
        if description.pairs is None:
            return 1
        least = _pair_site(description).networks_from(self.rank)
        return 1 if least == STARTS[0] else least  # shorter calls were not measured

    def _too_slow(self) -> str:
        return (
            f"not fitted: up to {STARTS[-1]} tokens networks of rank {self.rank} are slower than "
            "the bias as it is (measured on Hopper); --from-tokens 1 fits them all the same"
        )

    def _planned(
        self, result: FitResult, found: Collected, apart: bool, description: Description
    ) -> SitePlan:
        size = max(sample.bias.shape[-1] for sample in found.samples)
        queries = max(sample.bias.shape[-2] for sample in found.samples)
        on = "inputs held out" if apart else "the inputs that it was trained on"
        what = f"factor networks of rank {self.rank}: {result.reason}, judged on {on}"
        warnings = self.site.warnings
        if not apart:
            warnings += ("its fit was judged on the one input that it was trained on",)
        pair_site, start = _pair_site(description), result.networks.from_tokens
        too_dear = networks_in_words(queries, size, self.rank, pair_site)
        if result.reached and start > queries:
            warnings += (f"calls with fewer than {start} tokens keep the bias as it is",)
        elif result.reached and too_dear is not None:
            warnings += (too_dear,)
        site = dataclasses.replace(
            self.site,
            n=queries,
            m=size,
            warnings=warnings,
            forms=forms(queries, size, pair_site) if self.site.forms else (),
        )
        if not result.reached:
            return _unfitted(site, f"{NOT_REACHED}: {what}")
        bias = ScoreBias(description.exact_terms, self.site.heads)
        builders = description.builders if start > 1 else ()  # of the bias as it is
        modules = {FactorNetworks.kind: result.networks.cpu()}
        return dataclasses.replace(
            site,
            status="patched",
            reason=what,
            decisions=self._decisions(result),
            spec=with_builders(bias.spec(), builders, modules),
            bias=bias,
            modules=modules,
        )

    def _decisions(self, result: FitResult) -> tuple[HeadDecision, ...]:
        numbers = {name: value.tolist() for name, value in vars(result.loss).items()}
        return tuple(
            HeadDecision(
                head=head,
                term=FactorNetworks.kind,
                rank=self.rank,
                reason=result.reason,
                **{name: values[head] for name, values in numbers.items()},
            )
            for head in range(self.site.heads)
        )

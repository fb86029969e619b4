"""Fit factor networks to one site, and say whether they serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from ..builders import with_builders
from ..decompose.costs import BUCKETS
from ..decompose.decision import HeadDecision
from ..decompose.factor_networks import FactorNetworks
from ..decompose.neural import Check, FitResult, fit
from ..decompose.neural_options import FitOptions
from ..decompose.neural_samples import Sample
from ..decompose.pair_forms import STARTS, forms, networks_in_words
from ..errors import DecompositionError
from ..inputs import Batch
from ..inspection import find_site, leave_no_trace, pair_site
from ..plan import SitePlan, Status
from ..recipe import Description, Recipe, Registry
from ..terms import ScoreBias
from .collect import Collected, ObservationError, collect, cropped, tokens_of

#: called with the name of a site after every look at its fit
Progress = Callable[[str, Check], None]

#: beginning of the reason of a site whose fit is not good enough
NOT_REACHED = "the fit did not reach what was asked"
#: a warning
ONE_INPUT = "its fit was judged on the one input that it was trained on"
#: part of the reason of a site whose networks hold, but serve no call since they are slower
NOT_SERVING = "its networks do not serve: "


@dataclasses.dataclass(frozen=True)
class SiteFit:
    """One site, and how to fit it.

    Attributes:
        model, site, registry, options, rank: as for `fit_sites`.
        tokens: of longer samples a random choice of so many enters a step.
        from_tokens: see `fit_sites`.
    """

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
        """The site as planned, left alone, failed, or with its bias as it is.

        Args:
            batches: calls of the model.
            calls: samples that are kept.
            device: where networks are trained; default where the model is.
            state: a file that keeps the fit.
            progress: called after every look.
        """
        module = self.model.get_submodule(self.site.name)
        recipe = self.registry.find(module)
        if recipe is None or recipe.observe is None:
            reason = f"recipe {self.site.recipe} does not say what a fit needs"
            return _unfitted(self.site, reason, "unsupported")
        description = self._described(recipe)
        attention = self.options.loss == "attention"
        try:
            found = collect(
                self.model, module, recipe.observe, batches, most=calls, attention=attention
            )
        except ObservationError as error:
            return _unfitted(self.site, str(error), "failed")
        if not found.samples:
            return _unfitted(self.site, "it did not run on these inputs, or on single tokens alone")
        return self._fitted(found, description, device, state, progress)

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
        least = pair_site(description).networks_from(self.rank)
        return 1 if least == STARTS[0] else least  # shorter calls were not measured

    def _against(self, start: int | None, longest: int) -> str:
        """Why networks that hold what was asked serve no call; empty if they do."""
        if start is None and self.rank > BUCKETS[-1]:
            return f"no kernel takes factors of rank {self.rank}, at most {BUCKETS[-1]}"
        if start is None:
            return (
                f"up to {STARTS[-1]} tokens they are slower than the bias as it is, estimated from "
                "times on Hopper; --from-tokens 1 has them serve all the same"
            )
        if self.from_tokens is None and start > longest:
            return (
                f"the inputs have at most {longest} tokens, and they are faster from {start} on: "
                "bring longer ones, or say --from-tokens"
            )
        return ""

    def _as_it_is(self, site: SitePlan, fitted: str, why: str) -> SitePlan:
        """The site as it was planned without networks, which would have held."""
        served = self.site.reason.partition(":")[0]  # "dense in each call"
        return dataclasses.replace(site, reason=f"{served}; {NOT_SERVING}{why} ({fitted})")

    def _fitted(
        self,
        found: Collected,
        description: Description,
        device: torch.device | str | None,
        state: Path | None,
        progress: Progress | None,
    ) -> SitePlan:
        start = self._start(description)
        train, judges, apart = found.split(start or 1)
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
        against = self._against(start, found.longest)
        result.networks.from_tokens = start or 1
        judged = max(map(tokens_of, judges))
        return self._planned(result, found, judged, apart, description, against)

    def _planned(
        self,
        result: FitResult,
        found: Collected,
        judged: int,
        apart: bool,
        description: Description,
        against: str,
    ) -> SitePlan:
        size = max(sample.bias.shape[-1] for sample in found.samples)
        queries = max(sample.bias.shape[-2] for sample in found.samples)
        start = result.networks.from_tokens
        on = "inputs held out" if apart else "the inputs that it was trained on"
        where = f" from {start} tokens on" if start > 1 and not against else ""
        what = f"factor networks of rank {self.rank}{where}: {result.reason}, judged on {on}"
        serves = result.reached and not against
        site = dataclasses.replace(
            self.site,
            n=queries,
            m=size,
            warnings=(
                *self.site.warnings,
                *(() if apart else (ONE_INPUT,)),
                *(self._warnings(start, judged, queries, size, description) if serves else ()),
            ),
            forms=forms(queries, size, pair_site(description)) if self.site.forms else (),
        )
        if not result.reached:
            return _unfitted(site, f"{NOT_REACHED}: {what}")
        if against:
            return self._as_it_is(site, what, against)
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

    def _warnings(
        self, start: int, judged: int, n: int, m: int, description: Description
    ) -> list[str]:
        """What to know of networks that serve calls with `start` tokens and more."""
        if start > judged:
            return [
                f"its networks were judged on inputs of up to {judged} tokens, and serve "
                f"calls with {start} and more; all others keep the bias as it is"
            ]
        too_dear = networks_in_words(n, m, self.rank, pair_site(description))
        return [] if too_dear is None else [too_dear]

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


def _unfitted(site: SitePlan, reason: str, status: Status = "left alone") -> SitePlan:
    """A site without networks: nothing of what it was planned with before the fit stays.

    A site that serves its bias as it is was planned as patched; whoever asks for a fit that misses
    shall not find it converted to something else.
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


def _told(sample: Sample) -> str:
    """What tells a sample from others, as far as sums do."""
    return f"{float(sample.bias.double().sum())!r}, {float(sample.x_q.double().sum())!r}"

"""The largest error per head that the outputs of the whole model allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..decompose import expected_gain
from ..decompose.decision import HeadDecision
from ..decompose.gain import is_paired
from ..errors import FlashBiasError
from ..inputs import Batch
from ..plan import SitePlan
from ..verification.outputs import logits_name, tensors_of
from .alternatives import Form, merged, split_site


class CalibrationError(FlashBiasError):
    """No choice of terms keeps the outputs within the limit."""


@dataclass(frozen=True, eq=False)
class Alternatives:
    """A site with its forms, cheapest first."""

    site: SitePlan
    forms: list[Form]

    def choice(self, allowed: float) -> list[int]:
        """For each head the cheapest form whose error is at most `allowed`."""
        chosen = []
        for head in range(self.site.heads):
            fits = [i for i, f in enumerate(self.forms) if float(f.errors[head]) <= allowed]
            chosen.append(min(fits, key=lambda i: self.forms[i].cost))
        return chosen

    def planned(self, allowed: float, difference: float) -> SitePlan:
        """The site with its terms and decisions for `allowed`."""
        choice = self.choice(allowed)
        site, masks = self.site, split_site(self.site)[1]
        bias = merged(self.forms, choice, masks)
        decisions = tuple(
            self._decision(head, self.forms[at], allowed) for head, at in enumerate(choice)
        )
        counts = {f.label: choice.count(i) for i, f in enumerate(self.forms) if i in choice}
        parts = ", ".join(f"{label} in {count}" for label, count in counts.items())
        reason = (
            f"calibrated: {parts} of {self.site.heads} heads; outputs change by {difference:.2g}"
        )
        kinds = [term.kind for term in masks]
        sizes = site.n, site.m, site.head_dim
        gain = expected_gain(decisions, kinds, *sizes, paired=is_paired(bias.terms))
        return dataclasses.replace(
            site, decisions=decisions, reason=reason, gain=gain, spec=bias.spec(), bias=bias
        )

    def _decision(self, head: int, form: Form, allowed: float) -> HeadDecision:
        why = (
            f"{form.label}: {form.cost:.3g} ps per score, its outputs change by "
            f"{float(form.errors[head]):.3g}, at most {allowed:.3g} allowed"
        )
        return dataclasses.replace(form.decisions[head], reason=why)

    def cost(self, allowed: float) -> float:
        """Mean over heads times the number of scores of one call."""
        chosen = [self.forms[at].cost for at in self.choice(allowed)]
        return sum(chosen) * self.site.n * self.site.m


@dataclass
class Search:
    """Bisection over the error that a head may make.

    Attributes:
        alternatives: the sites.
        difference: runs the model with a choice; returns what its outputs change, relatively.
        limit: the largest accepted change.
        tried: allowed error -> measured change.
    """

    alternatives: list[Alternatives]
    difference: Callable[[float], float]
    limit: float
    tried: dict[float, float] = field(default_factory=dict)

    def run(self) -> float:
        """The largest allowed error whose change stays within the limit.

        Raises:
            CalibrationError: not even exact terms do.
        """
        steps = self._steps()
        if not self._holds(steps[0]):
            raise CalibrationError(
                f"even exact terms change the outputs by {self.tried[steps[0]]:.3g}, more than "
                f"{self.limit:.3g}",
                "allow more, see --max-output-error",
            )
        low, high = 0, len(steps)  # the first holds, what is past the end does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._holds(steps[middle]) else (low, middle)
        return steps[low]

    def _steps(self) -> list[float]:
        """Every error at which some head changes its form."""
        errors = {0.0}
        for each in self.alternatives:
            for form in each.forms:
                errors |= {float(e) for e in form.errors}
        return sorted(errors)

    def _holds(self, allowed: float) -> bool:
        self.tried[allowed] = self.difference(allowed)
        return self.tried[allowed] <= self.limit


@torch.no_grad()
def outputs_of(model: nn.Module, batches: Iterable[Batch]) -> list[Tensor]:
    """The logits of every batch, or the first output where there are none, in float64."""
    found = []
    for batch in batches:
        tensors = tensors_of(model(*batch.args, **batch.kwargs))
        name = logits_name(tensors) or next(iter(tensors))
        found.append(tensors[name].double())
    return found


def relative_change(outputs: list[Tensor], reference: list[Tensor]) -> float:
    """Root mean square of the change, relative to that of the reference; NaN counts as infinite."""
    return relative([squares(a, b) for a, b in zip(outputs, reference, strict=True)])


def squares(output: Tensor, reference: Tensor) -> tuple[float, float]:
    """Sums of squares over one batch: of the change, and of the reference."""
    return float((output - reference).square().sum()), float(reference.square().sum())


def relative(batches: Iterable[tuple[float, float]]) -> float:
    """`relative_change` from what `squares` says of every batch."""
    found = list(batches)
    off, size = sum(a for a, _ in found), sum(b for _, b in found)
    change = (off / size) ** 0.5 if size else float(off > 0)
    return change if change == change else float("inf")

"""The result of a comparison: per output, per site and overall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .difference import Difference

Mode = Literal["exact", "approximate"]
Verdict = Literal[
    "within rounding", "approximate", "exceeds rounding", "not finite", "not run", "not comparable"
]
_PASSING = ("within rounding", "approximate")


@dataclass(frozen=True)
class Comparison:
    """One output of the model, or of one site.

    Attributes:
        name: of the output or of the module.
        mode: "exact" where only rounding may differ; "approximate" where terms were truncated, in
            this site or in one that ran before it.
        verdict: what the numbers say.
        difference: the numbers; None where there are none.
        calls: how often the site ran; 0 for outputs of the model.
        reason: why it does not pass; "" if it does.
    """

    name: str
    mode: Mode
    verdict: Verdict
    difference: Difference | None = None
    calls: int = 0
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether this one is as it should be."""
        return self.verdict in _PASSING

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        numbers = None if self.difference is None else self.difference.to_json()
        return {**vars(self), "difference": numbers, "passed": self.passed}


@dataclass(frozen=True)
class Verification:
    """Whether a converted model agrees with its original.

    Attributes:
        mode: "exact" if no site was truncated; then every output must stay within the original's
            own rounding. "approximate": differences are reported, and judged by the limits that
            were given.
        reasons: why it does not pass; empty if it does.
        outputs: of the whole model.
        sites: one per converted module, in the order of the model's modules.
        agreement: share of samples or tokens for which both models prefer the same class or
            token; None without logits.
        own_agreement: the same of the original with itself in the wider dtype.
        scores: "original" and "converted" -> top-1 and top-5, or perplexity; empty without labels.
        max_difference, min_agreement: the limits, None where none was given.
        samples: how many went through both models.
        inputs: where they came from.
        dtype, wide_dtype, device: what was compared, against what, and where.
        notes: what the user should know.
        seconds: how long it took.
    """

    mode: Mode
    reasons: tuple[str, ...]
    outputs: tuple[Comparison, ...]
    sites: tuple[Comparison, ...]
    agreement: float | None
    own_agreement: float | None
    scores: dict[str, dict[str, Any]]
    max_difference: float | None
    min_agreement: float | None
    samples: int
    inputs: str
    dtype: str
    wide_dtype: str
    device: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the conversion can be trusted, as far as these inputs show."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "passed": self.passed,
            **vars(self),
            "reasons": list(self.reasons),
            "outputs": [o.to_json() for o in self.outputs],
            "sites": [s.to_json() for s in self.sites],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def compare(name: str, mode: Mode, numbers: Difference, calls: int = 0) -> Comparison:
    """The verdict on the numbers of one output or site."""
    if numbers.not_finite:
        reason = f"{numbers.not_finite} has NaN or infinity"
        return Comparison(name, mode, "not finite", numbers, calls, reason)
    if mode == "approximate":
        return Comparison(name, mode, "approximate", numbers, calls)
    if numbers.within_rounding:
        return Comparison(name, mode, "within rounding", numbers, calls)
    reason = (
        f"error {numbers.error_max:.3g} (rms {numbers.error_rms:.3g}), rounding allows "
        f"{numbers.allowed_max:.3g} (rms {numbers.allowed_rms:.3g})"
    )
    return Comparison(name, mode, "exceeds rounding", numbers, calls, reason)

"""The plan: what was decided for every site and head, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .builder_module import BuilderModule
from .decompose.decision import HeadDecision
from .decompose.pair_forms import PairForm
from .errors import CheckpointError
from .options import PLAN_FORMAT, DecomposeOptions
from .terms import ScoreBias

FORMAT_VERSION = 1

Status = Literal["patched", "left alone", "unsupported", "failed"]


@dataclass
class SitePlan:
    """The decision for one site.

    Attributes:
        name: fully qualified module name.
        recipe: name of the recipe.
        status: "patched" (in a dry run: would be), "left alone", "unsupported" or "failed".
        reason: why, in words; for a patched site what was chosen.
        n, m, heads, head_dim: sizes of one attention call (0 when unknown).
        decisions: one per head; empty unless the bias was decomposed.
        gain: how many times as fast as with a dense bias in torch's fused attention its attention
            should be, see `decompose.expected_gain`; None where nobody measured it.
        warnings: what a user should know about this site.
        not_finite: whether it failed because its bias holds NaN or infinity.
        forms: of a bias that is made anew in each call, the forms that it can take, see
            `decompose.pair_forms.forms`; empty for other sites.
        spec: `ScoreBias.spec()` of the terms, masks included; None unless patched.
        bias: the terms themselves; only in memory.
        modules: builders with weights, by the names that calls use; only in memory.
    """

    name: str
    recipe: str
    status: Status
    reason: str
    n: int = 0
    m: int = 0
    heads: int = 0
    head_dim: int = 0
    decisions: tuple[HeadDecision, ...] = ()
    gain: float | None = None
    warnings: tuple[str, ...] = ()
    not_finite: bool = False
    forms: tuple[PairForm, ...] = ()
    spec: dict[str, Any] | None = None
    bias: ScoreBias | None = field(default=None, repr=False, compare=False)
    modules: Mapping[str, BuilderModule] | None = field(default=None, repr=False, compare=False)

    def terms(self) -> tuple[str, ...]:
        """Kinds of the terms of a patched site, in order, each once."""
        entries = self.spec["terms"] if self.spec else []
        return tuple(dict.fromkeys(entry["kind"] for entry in entries))

    def trains_terms(self) -> bool:
        """Whether the terms of a patched site are parameters."""
        return bool(self.spec and self.spec.get("trained"))

    def builders(self) -> tuple[str, ...]:
        """Names of the builders of a patched site."""
        return tuple(self.spec.get("builders", ())) if self.spec else ()

    def builder_modules(self) -> tuple[str, ...]:
        """Kinds of the builders with weights of a patched site."""
        entries = self.spec.get("builder_modules", ()) if self.spec else ()
        return tuple(dict.fromkeys(entry["kind"] for entry in entries))

    def is_exact(self) -> bool:
        """Whether nothing of the bias was lost: no logit moves but by rounding.

        Terms that are trained leave the original's bias behind.
        """
        return not self.trains_terms() and all(d.logit_error_max == 0 for d in self.decisions)

    def ranks(self) -> list[int]:
        """Ranks of the heads that have a low-rank term."""
        return [d.rank for d in self.decisions if d.rank is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the tensors."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["bias"], fields["modules"]
        fields["decisions"] = [d.to_json() for d in self.decisions]
        fields["warnings"] = list(self.warnings)
        fields["forms"] = [dict(form) for form in self.forms]
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        values = dict(data)
        values["decisions"] = tuple(HeadDecision.from_json(d) for d in values["decisions"])
        values["warnings"] = tuple(values["warnings"])
        # older plans have none
        values["forms"] = tuple(dict(form) for form in values.get("forms", ()))
        return cls(**values)


@dataclass
class Plan:
    """The decisions for a whole model.

    Attributes:
        options: how biases were decomposed.
        sites: one entry per site, in the order of the model's modules.
        arch: how to build the model again, as JSON, or None if only the caller knows.
        versions: versions of this package and of the libraries that matter.
    """

    options: DecomposeOptions
    sites: list[SitePlan]
    arch: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def with_status(self, status: Status) -> list[SitePlan]:
        """The sites that ended with `status`."""
        return [site for site in self.sites if site.status == status]

    @property
    def patched(self) -> list[SitePlan]:
        """The sites that are (or in a dry run would be) patched."""
        return self.with_status("patched")

    def counts(self) -> dict[str, int]:
        """Number of sites by status."""
        return dict(Counter(site.status for site in self.sites))

    def why_nothing(self) -> str:
        """Of a plan that patches no site: how its sites end, and the most frequent reason."""
        if not self.sites:
            return "it has no sites"
        counts = ", ".join(f"{status} {count}" for status, count in self.counts().items())
        (reason, _), *others = Counter(site.reason for site in self.sites).most_common()
        return f"{counts} ({reason}{', and other reasons' if others else ''})"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; everything that `load_model` needs besides the tensors."""
        return {
            "format": PLAN_FORMAT,
            "format_version": FORMAT_VERSION,
            "options": self.options.to_json(),
            "arch": self.arch,
            "versions": self.versions,
            "sites": [site.to_json() for site in self.sites],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of `to_json`.

        Raises:
            CheckpointError: not a plan, of a newer format, or with fields missing.
        """
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            raise CheckpointError("this is not a flashbias-convert plan")
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"the plan has format version {version}, this program reads {FORMAT_VERSION}",
                "update flashbias-convert",
            )
        try:
            return cls(
                options=DecomposeOptions.from_json(data["options"]),
                sites=[SitePlan.from_json(site) for site in data["sites"]],
                arch=data["arch"],
                versions=data["versions"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the plan is damaged: {error!r}") from error

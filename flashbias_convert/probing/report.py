"""What the prober found, as data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..terms import ScoreBias

Kind = Literal[
    "none",
    "constant",
    "per key",
    "offset",
    "low rank",
    "dense",
    "gated",
    "query-dependent",
    "input-dependent",
    "unknown",
]
#: what each kind means, in words
MEANING: dict[str, str] = {
    "none": "nothing is added to the scores",
    "constant": "constant along every row, which softmax ignores",
    "per key": "one number per key",
    "offset": "one number per offset of query and key",
    "low rank": "the same for all inputs, of low rank",
    "dense": "the same for all inputs, of no special form",
    "gated": "the same rows for all inputs, each times a gate that depends on the input",
    "query-dependent": "a linear function of the query",
    "input-dependent": "differs from input to input",
    "unknown": "not understood",
}
#: kinds that leave nothing to convert
FREE = ("none", "constant")


@dataclass(frozen=True)
class SiteProbe:
    """What one attention call of a model adds to its scores.

    Attributes:
        site: qualified name of the module that attends; with "#2" and so on where it does so more
            than once.
        module_class: qualified name of its class.
        seen: "sdpa" or "softmax", where the bias was seen.
        kind: see `MEANING`.
        detail: the kind, more precisely, in words.
        heads, n, m, head_dim, batch: sizes of the call; windows count in the batch.
        scale: what q k^T is multiplied with, one number or one per head.
        causal: every query sees itself and the keys before it.
        term: which term would serve, or "" where none is needed.
        ranks: per head, columns that keep `energy` of the row-centred bias; None where no SVD
            was made. Where the bias depends on the input: of the worst batch entry.
        attention_errors: per head, what the softmax loses with these ranks, in [0, 1].
        dense_bytes: the bias of one call, written out.
        term_bytes: the terms for the same call.
        recipe: name of the recipe that converts it, if there is one.
        recipe_site: name of the module that this recipe replaces: the site's, or one above.
        refused: why a recipe that knows it does not convert it, after the name of the recipe; "".
        calls: how often the module ran in one forward pass of the model.
        notes: what a user should know, one sentence each.
        bias: shape (b, H, N, M), without masks, in the model's dtype; of the first input where it
            depends on the input. b is 1, the number of window types, or the batch. In memory only.
        terms: the terms of a bias that does not depend on the input. In memory only.
    """

    site: str
    module_class: str
    seen: str
    kind: Kind
    detail: str
    heads: int = 0
    n: int = 0
    m: int = 0
    head_dim: int = 0
    batch: int = 0
    scale: float | tuple[float, ...] = 1.0
    causal: bool = False
    term: str = ""
    ranks: tuple[int, ...] | None = None
    attention_errors: tuple[float, ...] | None = None
    dense_bytes: int = 0
    term_bytes: int = 0
    recipe: str | None = None
    recipe_site: str | None = None
    refused: str = ""
    calls: int = 1
    notes: tuple[str, ...] = ()
    bias: Tensor | None = field(default=None, repr=False, compare=False)
    terms: ScoreBias | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the module, without a number behind it."""
        return self.site.partition("#")[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the tensors."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["bias"], values["terms"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class Probe:
    """What was found in a model.

    Attributes:
        model_class: qualified name of its class.
        sites: in the order in which they ran.
        energy: to which `SiteProbe.ranks` refer.
        inputs: how the two inputs were made.
        notes: about the whole model, one sentence each.
    """

    model_class: str
    sites: tuple[SiteProbe, ...]
    energy: float
    inputs: str
    notes: tuple[str, ...] = ()

    @property
    def biased(self) -> tuple[SiteProbe, ...]:
        """The sites that add something that softmax does not ignore."""
        return tuple(site for site in self.sites if site.kind not in FREE)

    def counts(self) -> dict[str, int]:
        """Number of sites by kind."""
        return dict(Counter(site.kind for site in self.sites))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "model_class": self.model_class,
            "energy": self.energy,
            "inputs": self.inputs,
            "notes": list(self.notes),
            "counts": self.counts(),
            "sites": [site.to_dict() for site in self.sites],
        }

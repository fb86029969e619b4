"""The ways in which a head's bias can be carried: what each loses and costs; the exact ones.

Those that truncate come from `truncations`.

Closed forms (ALiBi, spatial distance) are recipes' own knowledge; a recognised one would become
one more candidate in `exact_candidates`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from ..options import DecomposeOptions
from ..terms import Lookup, RelativeTable
from .costs import added_cost, is_measured, rank_bucket
from .decision import HeadDecision, kernel_columns
from .gain import is_paired
from .head_tables import Tables

#: A tail may exceed what `energy` allows by this, relatively and absolutely: fp32 factors.
ENERGY_SLACK_RELATIVE, ENERGY_SLACK_ABSOLUTE = 1e-6, 1e-12

#: What the entries of a table are for.
_OF = {RelativeTable.kind: "relative positions", Lookup.kind: "values, looked up for each pair,"}


@dataclass(frozen=True)
class Candidate:
    """One way to carry one head; the numbers are those of `HeadDecision`.

    Attributes:
        term: kind of the term, or of two that go together, or "none".
        cost: picoseconds per score, see `costs.added_cost`.
        why: what speaks for it, a clause of a sentence.
    """

    term: str
    cost: float
    why: str
    rank: int | None = None
    energy: float = 1.0
    logit_error_max: float = 0.0
    logit_error_rms: float = 0.0
    attention_error: float = 0.0
    split: int = 0

    def decision(self, head: int, reason: str) -> HeadDecision:
        """This candidate as the decision for `head`."""
        numbers = dataclasses.asdict(self)
        del numbers["cost"], numbers["why"]
        return HeadDecision(head=head, reason=reason, **numbers)

    def label(self) -> str:
        """Its name in a sentence."""
        if self.rank is None:
            return self.term
        return f"{self.term} of rank {self.rank} (padded {self.padded()})"

    def padded(self) -> int:
        """Columns that a kernel works with."""
        return rank_bucket(kernel_columns(self.rank or 0, self.split))

    def miss(self, options: DecomposeOptions) -> str:
        """Which criterion of `options` it misses; empty if it holds both."""
        allowed = (1 - options.energy) * (1 + ENERGY_SLACK_RELATIVE) + ENERGY_SLACK_ABSOLUTE
        if 1 - self.energy > allowed:
            return f"{self.why}: less energy than {options.energy:.6%}"
        if self.attention_error > options.max_attention_error:
            return f"{self.why}: more than {options.max_attention_error:.3g}"
        return ""


NO_TERM = Candidate("none", 0.0, "constant along every row, which softmax ignores")


def exact_candidates(
    bias: Tensor, head: int, tables: Tables, head_dim: int | None = None
) -> list[Candidate]:
    """In order of preference at equal cost; nothing is lost (a table was compared bit for bit).

    A lookup comes before the bias itself, of which it takes fewer bytes, unless it costs more.
    """
    n, m = bias.shape[-2:]
    dense = added_cost("dense", n, m, head_dim=head_dim)
    found = [Candidate("dense", dense, "the bias itself is exact")]
    for members, term in tables:
        if head in members:
            kind = term.kind
            entries = term.table.shape[-1] if isinstance(term, Lookup) else term.entries
            cost = added_cost(kind, n, m, head_dim=head_dim, paired=is_paired([term]))
            why = f"a table of {entries} {_OF[kind]} is exact"
            if not is_measured(kind, head_dim):
                why += " (its cost was not measured, but reckoned from those of other terms)"
            at = 1 if kind == Lookup.kind and cost > dense else 0
            found.insert(at, Candidate(kind, cost, why))
    return found

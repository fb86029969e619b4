"""The ways in which a head's bias can be carried, with what each of them loses and costs.

Closed forms (ALiBi, spatial distance) are recipes' own knowledge; a recognised one would become
one more candidate in `exact_candidates`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError
from ..options import DecomposeOptions
from ..terms import LowRank, RelativeTable
from .costs import rank_bucket, relative_cost
from .decision import HeadDecision
from .exact import relative_table
from .loss import Loss, measure
from .svd import TruncatedSVD, split_columns, truncated_svd

#: A tail may exceed what `energy` allows by this, relatively and absolutely: fp32 factors.
ENERGY_SLACK_RELATIVE, ENERGY_SLACK_ABSOLUTE = 1e-6, 1e-12

#: Relative tables, each with the heads that it was found for.
Tables = list[tuple[list[int], RelativeTable]]


@dataclass(frozen=True)
class Candidate:
    """One way to carry one head; the numbers are those of `HeadDecision`.

    Attributes:
        term: kind of the term, or "none".
        cost: see `costs.relative_cost`.
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

    def decision(self, head: int, reason: str) -> HeadDecision:
        """This candidate as the decision for `head`."""
        numbers = dataclasses.asdict(self)
        del numbers["cost"], numbers["why"]
        return HeadDecision(head=head, reason=reason, **numbers)

    def label(self) -> str:
        """Its name in a sentence."""
        if self.rank is None:
            return self.term
        return f"{self.term} of rank {self.rank} (padded {rank_bucket(self.rank)})"

    def miss(self, options: DecomposeOptions) -> str:
        """Which criterion of `options` it misses; empty if it holds both."""
        allowed = (1 - options.energy) * (1 + ENERGY_SLACK_RELATIVE) + ENERGY_SLACK_ABSOLUTE
        if 1 - self.energy > allowed:
            return f"{self.why}: less energy than {options.energy:.6%}"
        if self.attention_error > options.max_attention_error:
            return f"{self.why}: more than {options.max_attention_error:.3g}"
        return ""


NO_TERM = Candidate("none", 0.0, "constant along every row, which softmax ignores")


@dataclass(frozen=True, eq=False)
class Truncation:
    """Factors of some heads as they will be stored, and what each matrix loses by them.

    Attributes:
        heads: which heads.
        svd: their factors, renumbered, and the ranks that the energy asked for.
        loss: measured with those factors, shape (*batch, len(heads)).
    """

    heads: list[int]
    svd: TruncatedSVD
    loss: Loss

    def candidates(self, n: int, m: int) -> dict[int, Candidate]:
        """A candidate per head, with the losses of its worst batch entry."""
        worst = {k: v.tolist() for k, v in vars(self.loss.worst_over_batch()).items()}
        found = {}
        ranks = zip(self.heads, self.svd.term.head_ranks(), self.svd.needed, strict=True)
        for at, (head, rank, needed) in enumerate(ranks):
            lost = {name: values[at] for name, values in worst.items()}
            free = f" ({needed} would do, the rest is free)" if rank > needed else ""
            why = (
                f"rank {rank}{free} keeps {lost['energy']:.4%} of the row-centred energy, "
                f"attention error {lost['attention_error']:.3g}"
            )
            cost = relative_cost("low_rank", n, m, rank)
            found[head] = Candidate("low_rank", cost, why, rank, **lost)
        return found

    def for_heads(self, heads: list[int]) -> LowRank:
        """The factors of some of the heads, without columns that only others needed."""
        at = [self.heads.index(h) for h in heads]
        picked = self.svd.term.select_heads(at)
        assert picked is not None
        rank = max(picked.head_ranks())
        phi_q, phi_k = (p[..., :rank].contiguous() for p in (picked.phi_q, picked.phi_k))
        # never more than before: filled columns were counted with that split
        split = split_columns(phi_q, phi_k, self.svd.errors[..., at])
        split = min(split, self.svd.term.split or 0)
        return dataclasses.replace(picked, phi_q=phi_q, phi_k=phi_k, split=split)


def truncate(
    bias: Tensor, heads: list[int], options: DecomposeOptions, name: str, visible: Tensor | None
) -> Truncation | None:
    """Low-rank factors of the heads; None where only exact terms are wanted or possible.

    Raises:
        DecompositionError: method "svd" and no SVD to be had. Method "auto" goes on without it,
            since exact terms always exist.
    """
    if not heads or options.method == "exact" or options.energy == 1.0:
        return None
    some = select(bias, heads)
    try:
        svd = truncated_svd(
            some,
            energy=options.energy,
            max_rank=options.max_rank,
            visible=visible,
            fill=options.fill,
        )
    except DecompositionError as error:
        if options.method == "auto":
            return None
        raise DecompositionError(f"{name or 'a bias'}: {error.args[0]}", error.hint) from error
    return Truncation(heads, svd, measure(some, svd.term, visible))


def find_tables(bias: Tensor, heads: list[int], index: Tensor | None, name: str) -> Tables:
    """Relative tables for as many of the heads as have one, in as few terms as possible."""
    if not heads:
        return []
    together = relative_table(select(bias, heads), index, name=name)
    if together is not None:
        return [(heads, together)]
    alone = {h: relative_table(select(bias, [h]), index, name=name) for h in heads}
    found = {h: term for h, term in alone.items() if term is not None}
    if len(found) < len(heads):
        return find_tables(bias, list(found), index, name)
    return _group(found)


def _group(found: dict[int, RelativeTable]) -> Tables:
    """Heads whose tables share their codes go into one term."""
    groups: list[list[int]] = []
    for head, term in found.items():
        for members in groups:
            first = found[members[0]]
            if torch.equal(first.u, term.u) and torch.equal(first.v, term.v):
                members.append(head)
                break
        else:
            groups.append([head])
    return [(members, _merge([found[h] for h in members])) for members in groups]


def _merge(terms: Sequence[RelativeTable]) -> RelativeTable:
    """One term from terms of one head each that share their codes."""
    return dataclasses.replace(terms[0], table=torch.cat([t.table for t in terms], dim=-2))


def exact_candidates(bias: Tensor, head: int, tables: Tables) -> list[Candidate]:
    """In order of preference at equal cost; nothing is lost (a table was compared bit for bit)."""
    n, m = bias.shape[-2:]
    found = []
    for members, term in tables:
        if head in members:
            why = f"a table of {term.table.shape[-1]} relative positions is exact"
            found.append(Candidate("relative_table", relative_cost("relative_table", n, m), why))
    found.append(Candidate("dense", relative_cost("dense", n, m), "the bias itself is exact"))
    return found


def select(bias: Tensor, heads: list[int]) -> Tensor:
    """The matrices of some heads; the bias itself where they are all."""
    if len(heads) == bias.shape[-3]:
        return bias
    return bias.index_select(-3, torch.tensor(heads, device=bias.device))

"""The ways in which a head's bias can be carried, with what each of them loses and costs.

Closed forms (ALiBi, spatial distance) are recipes' own knowledge; a recognised one would become
one more candidate in `exact_candidates`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError
from ..options import DecomposeOptions
from ..terms import Diagonal, Lookup, LowRank, RelativeTable, Term
from .costs import SMALLEST_BUCKET, added_cost, is_measured, rank_bucket
from .decision import HeadDecision
from .exact import relative_table
from .lookups import few_values, lookup
from .loss import Loss, measure
from .low_rank_diagonal import truncated_svd_with_diagonal
from .svd import TruncatedSVD, split_columns, truncated_svd

#: A tail may exceed what `energy` allows by this, relatively and absolutely: fp32 factors.
ENERGY_SLACK_RELATIVE, ENERGY_SLACK_ABSOLUTE = 1e-6, 1e-12

#: What a decision calls factors and a diagonal together.
LOW_RANK_AND_DIAGONAL = "low_rank+diagonal"

#: What the entries of a table are for.
_OF = {RelativeTable.kind: "relative positions", Lookup.kind: "values, looked up for each pair,"}

#: Relative tables and lookups, each with the heads that it was found for.
Tables = list[tuple[list[int], RelativeTable | Lookup]]


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
        svd: their factors, renumbered, and the ranks that the energy asked for; with diagonals,
            or without.
        loss: measured with those terms, shape (*batch, len(heads)).
    """

    heads: list[int]
    svd: TruncatedSVD
    loss: Loss

    def candidates(self, n: int, m: int, head_dim: int | None = None) -> dict[int, Candidate]:
        """A candidate per head, with the losses of its worst batch entry."""
        worst = {k: v.tolist() for k, v in vars(self.loss.worst_over_batch()).items()}
        found = {}
        ranks = zip(self.heads, self.svd.term.head_ranks(), self.svd.needed, strict=True)
        for at, (head, rank, needed) in enumerate(ranks):
            lost = {name: values[at] for name, values in worst.items()}
            free = f" ({needed} would do, the rest is free)" if rank > needed else ""
            why = (
                f"{self._what(rank)}{free} keeps {lost['energy']:.4%} of the row-centred energy, "
                f"attention error {lost['attention_error']:.3g}"
            )
            kind, cost = self._kind(rank), added_cost("low_rank", n, m, rank, head_dim)
            if self.svd.diagonal is not None:
                cost += added_cost("diagonal", n, m, head_dim=head_dim)
            found[head] = Candidate(kind, cost, why, None if kind == "diagonal" else rank, **lost)
        return found

    def kinds(self) -> tuple[str, ...]:
        """What its candidates call themselves."""
        return ("low_rank",) if self.svd.diagonal is None else (LOW_RANK_AND_DIAGONAL, "diagonal")

    def _kind(self, rank: int) -> str:
        if self.svd.diagonal is None:
            return "low_rank"
        return LOW_RANK_AND_DIAGONAL if rank else "diagonal"

    def _what(self, rank: int) -> str:
        if self.svd.diagonal is None:
            return f"rank {rank}"
        return f"rank {rank} with a diagonal" if rank else "a diagonal alone"

    def terms(self, heads: list[int], total: int) -> tuple[Term, ...]:
        """The terms of some of the heads; `total` counts all heads of the bias."""
        diagonal = self._diagonal(heads, total)
        ranks = dict(zip(self.heads, self.svd.term.head_ranks(), strict=True))
        factored = [h for h in heads if ranks[h] or diagonal is None]
        factors = self.for_heads(factored) if factored else None
        if factors is not None:
            factors = dataclasses.replace(factors, heads=named(factored, total))
        return tuple(term for term in (factors, diagonal) if term is not None)

    def _diagonal(self, heads: list[int], total: int) -> Diagonal | None:
        if self.svd.diagonal is None:
            return None
        at = torch.tensor([self.heads.index(h) for h in heads], device=self.svd.diagonal.device)
        values = self.svd.diagonal.index_select(-2, at).contiguous()
        return Diagonal(values=values, heads=named(heads, total))

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


def named(heads: list[int], total: int) -> tuple[int, ...] | None:
    """The heads as terms name them: None where they are all."""
    return None if len(heads) == total else tuple(heads)


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

    def make() -> Truncation:
        svd = truncated_svd(
            some,
            energy=options.energy,
            max_rank=options.max_rank,
            visible=visible,
            fill=options.fill,
        )
        return Truncation(heads, svd, measure(some, svd.term, visible))

    return _attempt(make, options, name)


def truncate_with_diagonal(
    bias: Tensor,
    low_rank: Mapping[int, Candidate],
    options: DecomposeOptions,
    name: str,
    visible: Tensor | None,
) -> Truncation | None:
    """Factors and diagonals for the heads that need fewer columns with one.

    Args:
        low_rank: the heads' candidates without a diagonal.

    Returns:
        None where the options do not ask for it, the matrices are not square, or no head gains.

    Raises:
        DecompositionError: as `truncate`.
    """
    if not options.diagonal or not low_rank or bias.shape[-2] != bias.shape[-1]:
        return None
    heads = list(low_rank)
    most = [_most_worth_having(plain, options) for plain in low_rank.values()]

    def make() -> Truncation | None:
        found = truncated_svd_with_diagonal(
            select(bias, heads),
            energy=options.energy,
            most=most,
            max_rank=options.max_rank,
            visible=visible,
            fill=options.fill,
        )
        if found is None:
            return None
        kept, svd = [heads[at] for at in found[0]], found[1]
        loss = measure(select(bias, kept), svd.term, visible, diagonal=svd.diagonal)
        return Truncation(kept, svd, loss)

    return _attempt(make, options, name)


def _most_worth_having(plain: Candidate, options: DecomposeOptions) -> int:
    """The largest rank that, with a diagonal, beats a head's plain factors."""
    assert plain.rank is not None
    padded = rank_bucket(plain.rank)
    if plain.miss(options):
        return padded  # as many columns, but a criterion more
    return padded // 2 if padded > SMALLEST_BUCKET else 0


def _attempt(
    make: Callable[[], Truncation | None], options: DecomposeOptions, name: str
) -> Truncation | None:
    """What `make` returns; None if an SVD fails that the method can do without."""
    try:
        return make()
    except DecompositionError as error:
        if options.method == "auto":
            return None
        raise DecompositionError(f"{name or 'a bias'}: {error.args[0]}", error.hint) from error


def find_tables(bias: Tensor, heads: list[int], index: Tensor | None, name: str) -> Tables:
    """Tables for as many of the heads as have one, in as few terms as possible.

    Relative tables first: theirs are codes per token. The rest is looked up pair by pair, if it is.
    """
    found = _relative_tables(bias, heads, index, name)
    with_table = {head for members, _ in found for head in members}
    return found + _lookups(bias, [head for head in heads if head not in with_table])


def _lookups(bias: Tensor, heads: list[int]) -> Tables:
    """One term for the heads, or for those of them that take few values."""
    if not heads:
        return []
    term = lookup(select(bias, heads))
    if term is not None:
        return [(heads, term)]
    some = [head for head in heads if few_values(select(bias, [head]))]
    return _lookups(bias, some) if len(some) < len(heads) else []


def _relative_tables(bias: Tensor, heads: list[int], index: Tensor | None, name: str) -> Tables:
    if not heads:
        return []
    together = relative_table(select(bias, heads), index, name=name)
    if together is not None:
        return [(heads, together)]
    alone = {h: relative_table(select(bias, [h]), index, name=name) for h in heads}
    found = {h: term for h, term in alone.items() if term is not None}
    if len(found) < len(heads):
        return _relative_tables(bias, list(found), index, name)
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
            kind, entries = term.kind, term.table.shape[-1]
            cost = added_cost(kind, n, m, head_dim=head_dim)
            why = f"a table of {entries} {_OF[kind]} is exact"
            if not is_measured(kind, head_dim):
                why += " (its cost was not measured, but reckoned from those of other terms)"
            at = 1 if kind == Lookup.kind and cost > dense else 0
            found.insert(at, Candidate(kind, cost, why))
    return found


def select(bias: Tensor, heads: list[int]) -> Tensor:
    """The matrices of some heads; the bias itself where they are all."""
    if len(heads) == bias.shape[-3]:
        return bias
    return bias.index_select(-3, torch.tensor(heads, device=bias.device))

"""Factors for the heads of a bias, with diagonals or without, and what is lost by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError
from ..options import DecomposeOptions
from ..terms import Diagonal, LowRank, Term
from .candidates import Candidate
from .costs import SMALLEST_BUCKET, added_cost
from .decision import kernel_columns
from .head_tables import select
from .loss import Loss, measure
from .low_rank_diagonal import truncated_svd_with_diagonal
from .svd import TruncatedSVD, split_columns, truncated_svd

#: What a decision calls factors and a diagonal together.
LOW_RANK_AND_DIAGONAL = "low_rank+diagonal"


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

    def candidates(
        self, n: int, m: int, head_dim: int | None = None, split: int = 0
    ) -> dict[int, Candidate]:
        """A candidate per head, with the losses of its worst batch entry.

        Args:
            n, m, head_dim: see `costs.added_cost`.
            split: columns that heads which share a launch split; a head may need more by itself.
        """
        losses = vars(self.loss.worst_over_batch())
        # together: each list waits for a card
        worst = dict(zip(losses, torch.stack(tuple(losses.values())).tolist(), strict=True))
        found = {}
        ranks = zip(self.heads, self.svd.term.head_ranks(), self.svd.needed, strict=True)
        for at, (head, rank, needed) in enumerate(ranks):
            lost = {name: values[at] for name, values in worst.items()}
            free = f" ({needed} would do, the rest is free)" if rank > needed else ""
            why = (
                f"{self._what(rank)}{free} keeps {lost['energy']:.4%} of the row-centred energy, "
                f"attention error {lost['attention_error']:.3g}"
            )
            own = min(max(split, self.split_of([head])), rank)
            columns = kernel_columns(rank, own)
            kind, cost = self._kind(rank), added_cost("low_rank", n, m, columns, head_dim)
            if self.svd.diagonal is not None:
                cost += added_cost("diagonal", n, m, head_dim=head_dim)
            lost |= {"rank": None if kind == "diagonal" else rank, "split": own}
            found[head] = Candidate(kind, cost, why, **lost)
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
        return dataclasses.replace(picked, phi_q=phi_q, phi_k=phi_k, split=self.split_of(heads))

    def split_of(self, heads: list[int]) -> int:
        """How many columns these heads split, if they share a launch."""
        most = self.svd.term.split or 0
        at = [self.heads.index(h) for h in heads]
        if not most or not at:
            return 0
        ranks = self.svd.term.head_ranks()
        rank = max(ranks[i] for i in at)
        phi_q, phi_k = (
            self.svd.term.phi_q[..., at, :, :rank],
            self.svd.term.phi_k[..., at, :, :rank],
        )
        # never more than before: filled columns were counted with that split
        return min(split_columns(phi_q, phi_k, self.svd.errors[..., at]), most)


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
    padded = plain.padded()
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
        raise DecompositionError(f"{name or 'a bias'}: {error.message}", error.hint) from error

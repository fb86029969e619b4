"""Which term carries each head's bias: by what it loses and what it costs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..options import DecomposeOptions
from ..terms import ScoreBias, Term
from .candidates import NO_TERM, Candidate, exact_candidates
from .costs import SHORT_GAIN, SHORTEST_N, shared_dense_cost
from .decision import Decomposition
from .exact import dense_term, is_row_constant
from .head_tables import Tables, find_tables, select
from .robust_svd import check_bias, check_size
from .truncations import Truncation, named, truncate, truncate_with_diagonal


@torch.no_grad()
def decompose(
    bias: Tensor,
    options: DecomposeOptions,
    *,
    name: str = "",
    index: Tensor | None = None,
    visible: Tensor | None = None,
    head_dim: int | None = None,
    shared: bool = False,
) -> Decomposition:
    """Turn a bias into terms.

    Method "svd" truncates every head at the rank for `options.energy` (FlashBias, section 3.2);
    "exact" keeps every bit: a relative table where one is recognised, a lookup of few values where
    that costs no more than the dense bias, else the dense bias; "auto"
    takes, per head, the cheapest candidate (`costs.added_cost`) that keeps the energy and stays
    within `options.max_attention_error`, and sets `left_alone` for a site with fewer than
    `costs.SHORTEST_N` queries and keys. A truncation that fails either criterion is replaced by an
    exact term, with "svd" too. Energy 1.0 allows exact terms only. With `options.diagonal` low rank
    plus a diagonal competes with low rank alone: by cost in "auto", in "svd" where it pads to fewer
    columns. A head that is constant along its rows needs no term, whatever the method.

    Args:
        bias: floating point, shape (H, N, M) or (*batch, H, N, M), without masks. One decision
            per head holds for the whole batch: the worst entry decides.
        options: how; costs are those of Hopper, whatever `target` is.
        name: the site, for messages.
        index: integers, shape (N, M), the model's relative position index, if it has one.
        visible: bool, shape (N, M), True where a query attends to a key (causal attention).
        head_dim: size of a head, on which costs depend; None if it is not known.
        shared: calls have a batch that shares the bias, and neither mask, gate nor cosine: then a
            dense bias costs less, if all heads take it (`costs.shared_dense_cost`).

    Returns:
        Terms, with masks left out, and a decision per head. A site that is left alone still gets
        its exact terms, so that nothing is lost if they are used.

    Raises:
        UsageError: method "neural", or `visible` of another shape or dtype.
        DecompositionError: NaN or infinity, an index that is garbage, or (method "svd") a matrix
            that is too large or whose SVD never converges.
    """
    _check(bias, options, name, visible)
    bias = bias.detach()
    num_heads = bias.shape[-3]
    constant = is_row_constant(bias, visible).reshape(-1, num_heads).all(0).tolist()
    heads = [h for h in range(num_heads) if not constant[h]]
    left_alone = _left_alone(bias, options)
    truncations = [] if left_alone else _truncations(bias, heads, options, name, visible)
    n, m = bias.shape[-2:]
    low_rank = by_head(heads, [t.candidates(n, m, head_dim) for t in truncations])
    needs_exact = [h for h in heads if _taken_by_svd(low_rank[h], options) is None]
    tables = find_tables(bias, needs_exact, index, name)

    exact = {h: exact_candidates(bias, h, tables, head_dim) for h in heads}
    picked = dict.fromkeys(range(num_heads), (NO_TERM, NO_TERM.why))
    picked |= {h: pick(exact[h], low_rank[h], options) for h in heads}
    splits = [t.split_of(factored(t, picked)) for t in truncations]
    if any(splits):  # heads of one launch split as many columns as any of them needs
        found = zip(truncations, splits, strict=True)
        low_rank = by_head(heads, [t.candidates(n, m, head_dim, split) for t, split in found])
        picked |= {h: pick(exact[h], low_rank[h], options) for h in heads}
    if shared and options.method == "auto" and not left_alone:
        picked = all_dense(picked, shared_dense_cost(n, m, head_dim))
    terms = terms_of(bias, {h: c.term for h, (c, _) in picked.items()}, tables, truncations)
    split = {h: t.split_of(own) for t in truncations for own in [factored(t, picked)] for h in own}
    decisions = tuple(
        replace(c, split=min(split.get(h, 0), c.rank or 0)).decision(h, reason)
        for h, (c, reason) in picked.items()
    )
    return Decomposition(ScoreBias(terms, num_heads), decisions, left_alone)


def _check(bias: Tensor, options: DecomposeOptions, name: str, visible: Tensor | None) -> None:
    if options.method == "neural":
        raise UsageError(
            'method "neural" is for biases that depend on the input, see flashbias-convert fit',
            'for others there are "auto", "exact" and "svd"',
        )
    check_bias(bias, name)
    if options.method == "svd" and options.energy < 1.0:
        check_size(bias, name)
    if visible is not None and (visible.dtype != torch.bool or visible.shape != bias.shape[-2:]):
        raise UsageError(
            f"visible must be bool of shape {tuple(bias.shape[-2:])}, "
            f"got {visible.dtype} of shape {tuple(visible.shape)}"
        )


def _left_alone(bias: Tensor, options: DecomposeOptions) -> str | None:
    n, m = bias.shape[-2:]
    if options.method != "auto" or options.force_all or max(n, m) >= SHORTEST_N:
        return None
    gain = f"attention over fewer than {SHORTEST_N} gains little ({SHORT_GAIN})"
    return f"{n} queries and {m} keys: {gain}"


def _truncations(
    bias: Tensor, heads: list[int], options: DecomposeOptions, name: str, visible: Tensor | None
) -> list[Truncation]:
    """Low rank, and low rank with a diagonal, as far as the options ask for them."""
    plain = truncate(bias, heads, options, name, visible)
    if plain is None:
        return []
    low_rank = plain.candidates(*bias.shape[-2:])
    more = truncate_with_diagonal(bias, low_rank, options, name, visible)
    return [plain] if more is None else [plain, more]


def by_head(heads: list[int], found: list[dict[int, Candidate]]) -> dict[int, list[Candidate]]:
    """The truncations of each head, in order of what made them."""
    return {h: [some[h] for some in found if h in some] for h in heads}


def factored(truncation: Truncation, picked: dict[int, tuple[Candidate, str]]) -> list[int]:
    """The heads that have taken factors of a truncation, which share a launch."""
    kinds = truncation.kinds()
    return [h for h, (c, _) in picked.items() if c.term in kinds and c.rank]


# -- picking -------------------------------------------------------------------------------


def _taken_by_svd(low_rank: list[Candidate], options: DecomposeOptions) -> Candidate | None:
    """What settles a head without a look at exact terms: "svd" takes a truncation that holds."""
    if options.method != "svd":
        return None
    good = [c for c in low_rank if not c.miss(options)]
    # of equals the first one, without a diagonal
    return min(good, key=lambda c: c.padded(), default=None)


def pick(
    exact: list[Candidate], low_rank: list[Candidate], options: DecomposeOptions
) -> tuple[Candidate, str]:
    """The candidate for one head, and why.

    Args:
        exact: in order of preference.
        low_rank: the truncations that there are.
        options: method and criteria.
    """
    taken = _taken_by_svd(low_rank, options)
    if taken is not None:
        others = [c for c in low_rank if c is not taken]
        return taken, "; ".join([taken.why, *(f"instead of {c.label()}" for c in others)])
    misses = [miss for c in low_rank if (miss := c.miss(options))]
    if options.method != "auto":
        return exact[0], "; ".join([exact[0].why, *misses])
    candidates = [*exact, *(c for c in low_rank if not c.miss(options))]
    best = min(candidates, key=lambda c: c.cost)  # the first of equals: an exact one
    parts = [f"{best.why}, {best.cost:.3g} ps per score"]
    parts += [f"{c.label()}: {c.cost:.3g} ps" for c in candidates if c is not best]
    return best, "; ".join([*parts, *misses])


def all_dense(
    picked: dict[int, tuple[Candidate, str]], cost: float
) -> dict[int, tuple[Candidate, str]]:
    """The bias itself for all heads, if that costs no more than what was picked for each.

    Args:
        picked: the candidate of each head, and why.
        cost: of a head in picoseconds per score, if all heads are dense.
    """
    if cost * len(picked) > sum(candidate.cost for candidate, _ in picked.values()):
        return picked
    why = "the bias itself is exact, and batch entries share its tiles where all heads take it"
    dense = Candidate("dense", cost, why)
    return {
        head: (dense, f"{why}, {cost:.3g} ps per score; {old.label()}: {old.cost:.3g} ps")
        for head, (old, _) in picked.items()
    }


# -- terms ---------------------------------------------------------------------------------


def terms_of(
    bias: Tensor, kinds: dict[int, str], tables: Tables, truncations: list[Truncation]
) -> tuple[Term, ...]:
    """One term per kind, and per set of codes, for the heads that took it."""

    def of(*wanted: str) -> list[int]:
        return [h for h, taken in kinds.items() if taken in wanted]

    total = len(kinds)
    terms: list[Term] = []
    for truncation in truncations:
        heads = of(*truncation.kinds())
        terms += truncation.terms(heads, total) if heads else ()
    for members, table in tables:
        heads = [h for h in of(table.kind) if h in members]
        chosen = table.select_heads([members.index(h) for h in heads]) if heads else None
        if chosen is not None:
            terms.append(replace(chosen, heads=named(heads, total)))
    if of("dense"):
        terms.append(dense_term(select(bias, of("dense")), named(of("dense"), total)))
    return tuple(terms)

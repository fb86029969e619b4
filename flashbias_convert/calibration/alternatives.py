"""Cheaper and cheaper forms of one site's bias, and what each head loses by them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decompose import added_cost, measure
from ..decompose.decision import HeadDecision, kernel_columns
from ..decompose.gain import is_paired
from ..decompose.svd import truncated_svd
from ..modules import ScoreBiasModule
from ..plan import SitePlan
from ..terms import LowRank, ScoreBias, Term
from .capture import Call

#: kinds of terms that stand for a decomposed bias; all others are masks and closed forms
DECOMPOSED = ("relative_table", "lookup", "dense", "low_rank", "diagonal")
#: ranks that kernels compute with anyway
RANKS = (16, 32, 64, 128)
#: names of forms without a rank
NONE, EXACT = "none", "exact"


@dataclass(frozen=True, eq=False)
class Form:
    """One way to carry all heads of a site.

    Attributes:
        label: "none", "exact" or "rank R".
        bias: the terms, without masks.
        cost: picoseconds per score, see `decompose.added_cost`.
        decisions: one per head.
        errors: per head, root mean square of what attention outputs change, relative to them.
    """

    label: str
    bias: ScoreBias
    cost: float
    decisions: tuple[HeadDecision, ...]
    errors: Tensor

    def to(self, device: torch.device | str) -> Form:
        """The same with its terms on a device."""
        return dataclasses.replace(self, bias=self.bias.to(device))


def split_site(site: SitePlan) -> tuple[ScoreBias, tuple[Term, ...]]:
    """The decomposed terms of a planned site, and its masks and closed forms."""
    assert site.bias is not None
    own = tuple(t for t in site.bias.terms if t.kind in DECOMPOSED)
    masks = tuple(t for t in site.bias.terms if t.kind not in DECOMPOSED)
    return ScoreBias(own, site.bias.num_heads), masks


def forms_of(site: SitePlan, most: int | None) -> list[Form]:
    """The forms of a site, cheapest first, of which no errors are known yet.

    Args:
        site: planned with method "exact".
        most: cap on the rank, or None.
    """
    exact = split_site(site)[0]
    dense = exact.dense(site.n, site.m)
    found = [_nothing(site, dense)]
    for rank in RANKS:
        if rank < min(site.n, site.m) and (most is None or rank <= most):
            found.append(_truncated(site, dense, rank))
    found.append(Form(EXACT, exact, _cost(site), site.decisions, torch.zeros(site.heads)))
    return sorted(found, key=lambda form: form.cost)


def work_of(site: SitePlan) -> float:
    """About how much `forms_of` has to do: SVDs of H matrices."""
    return float(site.heads * site.n * site.m * min(site.n, site.m))


#: sums of squares per head: of the change by every form, and of the outputs
Sums = tuple[list[Tensor], Tensor]


def squares_of(site: SitePlan, forms: list[Form], calls: list[Call]) -> Sums:
    """What forms change in calls of a site, and what there is to change: float64, shape (H,)."""
    exact, masks = split_site(site)
    size = torch.zeros(site.heads).double()
    off = [torch.zeros(site.heads).double() for _ in forms]
    for call in calls:
        expected = _run(exact, masks, call).double()
        own = list(call.options.get("heads") or range(site.heads))
        size[own] += _per_head(expected)
        for form, sums in zip(forms, off, strict=True):
            if form.label != EXACT:
                sums[own] += _per_head(_run(form.bias, masks, call).double() - expected)
    return off, size


def with_errors(forms: list[Form], sums: list[Sums]) -> list[Form]:
    """The forms with their errors, from the sums of squares of every batch."""
    size = torch.stack([size for _, size in sums]).sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    found = []
    for at, form in enumerate(forms):
        off = torch.stack([off[at] for off, _ in sums]).sum(0)
        found.append(dataclasses.replace(form, errors=(off / size).sqrt()))
    return found


def _nothing(site: SitePlan, dense: Tensor) -> Form:
    lost = _numbers(dense, torch.zeros((), dtype=dense.dtype, device=dense.device))
    decisions = tuple(
        HeadDecision(h, NONE, None, reason="no bias at all", split=0, **lost[h])
        for h in range(site.heads)
    )
    return Form(NONE, ScoreBias((), site.heads), 0.0, decisions, torch.empty(0))


def _truncated(site: SitePlan, dense: Tensor, rank: int) -> Form:
    svd = truncated_svd(dense, energy=1.0, max_rank=rank)
    lost = _numbers(dense, svd.term)
    split = svd.term.split or 0
    decisions = tuple(
        HeadDecision(h, "low_rank", r, reason="", split=min(split, r), **lost[h])
        for h, r in enumerate(svd.term.head_ranks())
    )
    columns = kernel_columns(rank, split)
    cost = added_cost("low_rank", site.n, site.m, columns, site.head_dim)
    return Form(f"rank {rank}", ScoreBias((svd.term,), site.heads), cost, decisions, torch.empty(0))


def _numbers(dense: Tensor, approximation: Tensor | LowRank) -> list[dict[str, float]]:
    """What each head loses, by the names of `HeadDecision`."""
    lost = measure(dense, approximation).worst_over_batch()
    columns = {name: value.tolist() for name, value in vars(lost).items()}
    return [{name: values[h] for name, values in columns.items()} for h in range(dense.shape[-3])]


def _cost(site: SitePlan) -> float:
    """Of the dearest head."""
    assert site.bias is not None
    sizes, paired = (site.n, site.m), is_paired(site.bias.terms)
    costs = (
        added_cost(d.term, *sizes, head_dim=site.head_dim, paired=paired) for d in site.decisions
    )
    return max(costs, default=0.0)


def _run(bias: ScoreBias, masks: tuple[Term, ...], call: Call) -> Tensor:
    added = ScoreBias(bias.terms + masks, bias.num_heads).to(call.q.device)
    terms = ScoreBiasModule(added, "eager")
    out: Tensor = terms(call.q, call.k, call.v, **call.options)
    return out


def _per_head(values: Tensor) -> Tensor:
    """Sums of squares, shape (H,), on the CPU."""
    others = [d for d in range(values.dim()) if d != values.dim() - 3]
    return values.square().sum(others).cpu()


def merged(forms: list[Form], choice: list[int], masks: tuple[Term, ...]) -> ScoreBias:
    """The terms of a site whose head h is carried by ``forms[choice[h]]``, masks included."""
    terms: list[Term] = []
    for at, form in enumerate(forms):
        heads = [h for h, taken in enumerate(choice) if taken == at]
        for term in form.bias.terms if heads else ():
            picked = term.select_heads(heads)
            if picked is not None:
                own = range(len(heads)) if picked.heads is None else picked.heads
                terms.append(_renumbered(picked, [heads[i] for i in own], len(choice)))
    return ScoreBias((*terms, *masks), len(choice))


def _renumbered(term: Term, heads: list[int], total: int) -> Term:
    named = None if heads == list(range(total)) else tuple(heads)
    return dataclasses.replace(term, heads=named)

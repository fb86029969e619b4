"""Factors of a bias that is known for a while only: quickly, by a randomised SVD.

A pair representation does not change over the denoising steps of one structure, so factors that
are made once serve them all. They must not take long to make: no full SVD, no columns that could
not pay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..builder_module import without_autocast
from ..errors import UsageError
from ..options import DecomposeOptions
from ..terms import LowRank, ScoreBias
from .candidates import NO_TERM, Candidate, exact_candidates
from .choose import pick, terms_of
from .costs import affordable_rank
from .decision import Decomposition
from .energy import rank_for_energy
from .exact import is_row_constant
from .head_tables import select
from .loss import measure, row_center
from .robust_svd import check_bias
from .serving import Serving, Site
from .subspace import leading
from .svd import TruncatedSVD, assemble
from .truncations import Truncation

#: columns beyond those wanted of the randomised SVD
OVERSAMPLING = 8
#: the candidate of each head, and why
Picked = dict[int, tuple[Candidate, str]]


@torch.no_grad()
def decompose_quickly(
    bias: Tensor,
    *,
    energy: float = 0.99,
    rank: int | None = None,
    max_attention_error: float = 0.25,
    name: str = "",
    head_dim: int | None = None,
    serving: Serving | None = None,
) -> Decomposition:
    """Factors for the heads where they cost less than the bias itself, which the others keep.

    Rows are centred first, and draws are seeded: the same bias gives the same factors, and the
    caller's random numbers stay what they were.

    Args:
        bias: floating point, shape (*batch, H, N, M), without masks.
        energy: share of the squared singular values to keep, in (0, 1].
        rank: this rank for every head instead, whatever it loses; what it loses is measured.
        max_attention_error: see `DecomposeOptions`.
        name: the site, for messages.
        head_dim: size of a head, on which costs depend; None if it is not known.
        serving: the calls that the terms are for. What they save must be more than it takes to make
            the factors (`factor_times`), or all heads keep the bias: the SVD is left out where no
            rank can pay, and in vain where ranks turn out too high in too many heads. None counts
            the kernels alone.

    Returns:
        Terms, and a decision per head. Ranks whose factors cost no less than a dense bias
        (`costs.added_cost`) are not even looked for, unless `rank` asks for one.

    Raises:
        UsageError: a rank or an energy that makes no sense.
        DecompositionError: NaN or infinity in the bias.
    """
    options = DecomposeOptions(energy=energy, max_attention_error=max_attention_error)
    if rank is not None:
        if type(rank) is not int or rank < 1:
            raise UsageError(f"rank must be a positive integer, got {rank!r}")
        options = DecomposeOptions(energy=1e-12, max_attention_error=1.0)
    bias = bias.detach()
    check_bias(bias, name)
    count, (n, m) = bias.shape[-3], bias.shape[-2:]
    constant = is_row_constant(bias).reshape(-1, count).all(0).tolist()
    heads = [h for h in range(count) if not constant[h]]
    picked: Picked = dict.fromkeys(range(count), (NO_TERM, NO_TERM.why))
    site, against, columns = None, "", 0
    if heads and options.energy < 1.0:
        columns = rank or affordable_rank(n, m, head_dim)
        if serving is not None:
            site = Site(bias[..., 0, 0].numel() // count, len(heads), n, m, head_dim, serving)
            columns = site.paying_rank(rank)
            against = "" if columns else site.reason_against(rank)
    columns, truncations = min(n, m, columns), []
    if columns:
        some = select(bias, heads)
        with without_autocast(bias.device):  # whose products would be those of half precision
            svd = _truncated(some, energy, rank, columns)
            truncations.append(Truncation(heads, svd, measure(some, svd.term)))
    found = truncations[0].candidates(n, m, head_dim) if truncations else {}
    for head in heads:
        low_rank = [found[head]] if head in found else []
        best, why = pick(exact_candidates(bias, head, [], head_dim), low_rank, options)
        picked[head] = best, "; ".join(filter(None, [why, against]))
    in_vain = site is not None and columns > 0 and not _pays(picked, site, columns)
    terms = terms_of(bias, {h: c.term for h, (c, _) in picked.items()}, [], truncations)
    decisions = tuple(c.decision(h, reason) for h, (c, reason) in picked.items())
    return Decomposition(ScoreBias(terms, count), decisions, in_vain=in_vain)


def _pays(picked: Picked, site: Site, columns: int) -> bool:
    """Whether the factors of all heads pay together; if not, these heads get the bias itself.

    The time is spent already, and yet nothing is approximated that saves nothing in all.
    """
    taken = {h: c for h, (c, _) in picked.items() if c.term == "low_rank"}
    dense = site.dense_ps()
    saved = sum(site.saved_ms(dense - c.cost) for c in taken.values())
    spent = site.spent_ms(columns)
    if saved > spent:
        return True
    what = f"factors of {len(taken)} of {site.heads} heads"
    for head, candidate in taken.items():
        exact = Candidate("dense", dense, "the bias itself is exact")
        why = f"{exact.why}, {dense:.3g} ps per score; {candidate.label()}: {candidate.cost:.3g} ps"
        picked[head] = exact, f"{why}; {site.balance(what, saved, spent)}"
    return False


@torch.no_grad()
def quick_factors(bias: Tensor, rank: int) -> LowRank:
    """Nearly the best factors of this rank, of every head, whether they pay or not.

    Args:
        bias: floating point and finite, shape (*batch, H, N, M); rows are centred.
        rank: at most the smaller of N and M.
    """
    with without_autocast(bias.device):
        return _truncated(bias.detach(), 1.0, rank, rank).term


def _truncated(bias: Tensor, energy: float, rank: int | None, columns: int) -> TruncatedSVD:
    """Balanced factors, each head at its rank, or at all columns where they do not suffice."""
    wide = bias if bias.dtype == torch.float64 else bias.float()
    matrix = row_center(wide).reshape(-1, *bias.shape[-3:])  # (B, H, N, M)
    found = leading(matrix, min(columns + OVERSAMPLING, *matrix.shape[-2:]))
    kept, total = found.values.square().cumsum(-1), found.total
    rest = (total - kept[..., -1]).clamp(min=0).sqrt()  # what no column holds, as one value more
    known = torch.cat([found.values, rest[..., None]], -1).sort(-1, descending=True).values
    needed = [columns] * matrix.shape[1]
    if rank is None:
        wanted = rank_for_energy(known, energy).amax(0)
        needed = [min(int(r), columns) for r in wanted]
    sides = found.factors(columns)
    pieces = [(sides[0][:, h], sides[1][:, h]) for h in range(len(needed))]
    lost = [(total[:, h] - kept[:, h, r - 1]).clamp(min=0) for h, r in enumerate(needed)]
    rms = (torch.stack(lost, -1) / (matrix.shape[-2] * matrix.shape[-1])).sqrt()
    return assemble(pieces, needed, rms.to(bias.device), bias.shape[:-3])

"""Low rank plus sparse: a few cells that keep their values, and factors for everything else.

The limitations section of the FlashBias paper proposes it for biases such as those of gravity,
which are smooth but for near neighbours. Which cells are kept is found by a convex program,
principal component pursuit (Candès et al., "Robust principal component analysis?", 2011), with the
inexact augmented Lagrange multipliers of Lin, Chen and Ma (2010); or the caller says, for instance
the nearest neighbours.

What can be served: the factors, by every backend. The sparse part has no kernel of its own. It can
be carried by `Dense`, which then costs what the whole bias would, or by `Lookup`, which reads an
integer per pair; both give up what low rank is for. So this measures what a sparse kernel would
buy, and `choose.decompose` never takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ..terms import Dense, Lookup, LowRank, Term
from .loss import Loss, measure, row_center
from .robust_svd import check_bias, check_size, robust_svd, svd_by_gram
from .svd import balanced, truncated_svd

#: The pursuit stops when its two parts add up to the bias within this, relatively.
TOLERANCE, MOST_STEPS = 1e-6, 200
#: Steps that fit the factors to the cells that are not kept.
REFINEMENTS = 100


@dataclass(frozen=True, eq=False)
class LowRankSparse:
    """A row-centred bias as factors and kept cells, and what is lost with and without the latter.

    Attributes:
        low_rank: the factors, fp32, all heads of one rank.
        cells: bool (*batch, H, N, M), which cells are kept.
        values: fp32 (*batch, H, N, M), what the factors lack there; zero elsewhere.
        density: share of cells that are kept, float64 (*batch, H).
        loss: with both parts, see `Loss`; shapes (*batch, H).
        factors_alone: if the kept cells are left out.
        plain: of a truncated SVD of the same rank, the best that factors alone can do.
        converged: whether the pursuit ended by itself; True where cells were given.
    """

    low_rank: LowRank
    cells: Tensor
    values: Tensor
    density: Tensor
    loss: Loss
    factors_alone: Loss
    plain: Loss
    converged: bool

    def terms(self, sparse: Literal["dense", "lookup"]) -> tuple[Term, ...]:
        """Both parts as terms.

        Args:
            sparse: what carries the kept cells: "dense" (an N x M matrix per head) or "lookup" (an
                integer per pair for all heads, and a table of the values). Neither is cheaper than
                `Dense` for the whole bias by much, if at all.
        """
        if sparse == "dense":
            return (self.low_rank, Dense(bias=self.values))
        if sparse == "lookup":
            return (self.low_rank, self._lookup())
        raise UsageError(f'sparse must be "dense" or "lookup", got {sparse!r}')

    def _lookup(self) -> Lookup:
        kept = self.cells.any(-3)  # by any head: the codes serve all
        lead, (n, m) = kept.shape[:-2], kept.shape[-2:]
        flat = kept.reshape(-1, n * m)
        code = flat.long().cumsum(-1) * flat  # 0 is "not kept"
        heads = self.values.shape[-3]
        values = self.values.reshape(len(flat), heads, n * m)
        table = values.new_zeros(len(flat), heads, int(code.max()) + 1)
        table.scatter_(-1, code[:, None].expand_as(values), values * flat[:, None])
        return Lookup(table=table.reshape(*lead, heads, -1), code=code.int().reshape(*lead, n, m))


@torch.no_grad()
def low_rank_plus_sparse(
    bias: Tensor, *, rank: int, weight: float = 1.0, visible: Tensor | None = None
) -> LowRankSparse:
    """Find the cells to keep by principal component pursuit, and factors for the rest.

    The pursuit minimises ``|L|_* + weight / sqrt(max(N, M)) |S|_1`` with L + S the row-centred
    bias. L is then cut at `rank` and fitted once more to the cells outside the support of S.

    Args:
        bias: floating point, shape (*batch, H, N, M), without masks; on any device, in float64.
            One decomposition of every matrix per step, some dozens of steps.
        rank: of the factors.
        weight: 1 is the choice of theory; more keeps fewer cells.
        visible: bool, shape (N, M); see `svd.spectrum`.

    Raises:
        UsageError: a rank or a weight that makes no sense.
        DecompositionError: NaN or infinity, an absurd size, or an SVD that never converges.
    """
    if not 0.0 < weight < float("inf"):
        raise UsageError(f"weight must be positive, got {weight}")
    matrix = _centred(bias, rank, visible)
    low_rank, sparse, converged = _pursuit(matrix, weight)
    cells = sparse != 0
    return _finished(bias, matrix, cells, rank, visible, converged, low_rank)


@torch.no_grad()
def low_rank_beside_cells(
    bias: Tensor, cells: Tensor, *, rank: int, visible: Tensor | None = None
) -> LowRankSparse:
    """Factors for a bias of which some cells keep their values, such as nearest neighbours.

    Args:
        bias, rank, visible: see `low_rank_plus_sparse`.
        cells: bool, broadcasts to the shape of `bias`, True where a value is kept.

    Raises:
        UsageError: a rank that makes no sense, or cells of another shape or dtype.
        DecompositionError: see `low_rank_plus_sparse`.
    """
    matrix = _centred(bias, rank, visible)
    if cells.dtype != torch.bool:
        raise UsageError(f"cells must be bool, got {cells.dtype}")
    try:
        cells = cells.to(bias.device).expand(bias.shape).reshape(matrix.shape)
    except RuntimeError as error:
        raise UsageError(
            f"cells of shape {tuple(cells.shape)} do not fit a bias of {tuple(bias.shape)}"
        ) from error
    return _finished(bias, matrix, cells, rank, visible, True)


def _centred(bias: Tensor, rank: int, visible: Tensor | None) -> Tensor:
    """float64 (B, N, M), where B counts heads, too."""
    check_size(bias)
    check_bias(bias)
    if type(rank) is not int or rank < 1:
        raise UsageError(f"rank must be a positive integer, got {rank!r}")
    return row_center(bias.double(), visible).reshape(-1, *bias.shape[-2:])


# -- the pursuit ---------------------------------------------------------------------------


def _pursuit(matrix: Tensor, weight: float) -> tuple[Tensor, Tensor, bool]:
    """L and S (B, N, M), and whether they add up; inexact augmented Lagrange multipliers."""
    threshold = weight / max(matrix.shape[-2:]) ** 0.5
    size = _norm(matrix)
    spectral = robust_svd(matrix, vectors=False)[1][:, :1, None]
    nonzero = torch.where(spectral > 0, spectral, torch.ones_like(spectral))
    # where the multiplier starts, and how the penalty grows, as Lin et al. do
    dual = matrix / torch.maximum(nonzero, matrix.abs().amax((-2, -1), keepdim=True) / threshold)
    penalty = 1.25 / nonzero
    most = 1e7 * penalty
    sparse = torch.zeros_like(matrix)
    for _ in range(MOST_STEPS):
        low_rank = _shrink_values(matrix - sparse + dual / penalty, 1 / penalty)
        sparse = _shrink(matrix - low_rank + dual / penalty, threshold / penalty)
        rest = matrix - low_rank - sparse
        dual = dual + penalty * rest
        penalty = torch.minimum(1.5 * penalty, most)
        if bool((_norm(rest) <= TOLERANCE * size).all()):
            return low_rank, sparse, True
    return low_rank, sparse, False


def _norm(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1)).sqrt()


def _shrink(x: Tensor, by: Tensor) -> Tensor:
    """Towards zero, entry by entry: the proximal map of the sum of absolute values."""
    return x.sign() * (x.abs() - by).clamp(min=0)


def _shrink_values(matrix: Tensor, by: Tensor) -> Tensor:
    """The same for the singular values: the proximal map of their sum.

    Eigenvectors of the Gram matrix do: on a GPU they come many times faster, and values below 1e-8
    of the largest, which they do not resolve, are below `by` until the two parts add up.
    """
    try:
        u, values, v = svd_by_gram(matrix)
    except torch.linalg.LinAlgError:
        u, values, v = robust_svd(matrix, vectors=True)
    return (u * (values[:, None] - by).clamp(min=0)) @ v.mT


# -- factors for the rest ------------------------------------------------------------------


def _finished(
    bias: Tensor,
    matrix: Tensor,
    cells: Tensor,
    rank: int,
    visible: Tensor | None,
    converged: bool,
    start: Tensor | None = None,
) -> LowRankSparse:
    rank = min(rank, *matrix.shape[-2:])
    # from the whole matrix, so that the plain truncation is never better, and as if the kept cells
    # were zero, or from what the pursuit found
    other = matrix.masked_fill(cells, 0.0) if start is None else start
    phi_q, phi_k = _better(matrix, cells, rank, (matrix, other))
    product = phi_q.double() @ phi_k.double().mT
    values = torch.where(cells, matrix - product, torch.zeros_like(matrix)).float()
    lead = bias.shape[:-2]
    low_rank = LowRank(
        phi_q=phi_q.reshape(*lead, *phi_q.shape[-2:]),
        phi_k=phi_k.reshape(*lead, *phi_k.shape[-2:]),
    )
    both = (product + values).reshape(bias.shape)
    plain = truncated_svd(bias, energy=1.0, max_rank=rank, visible=visible).term
    return LowRankSparse(
        low_rank=low_rank,
        cells=cells.reshape(bias.shape),
        values=values.reshape(bias.shape),
        density=cells.double().mean((-2, -1)).reshape(lead),
        loss=measure(bias, both, visible),
        factors_alone=measure(bias, low_rank, visible),
        plain=measure(bias, plain, visible),
        converged=converged,
    )


def _better(
    matrix: Tensor, cells: Tensor, rank: int, starts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Factors (B, N, R), (B, M, R) for the cells that are not kept: the best of some starts."""
    found = [_beside(matrix, cells, rank, start) for start in starts]
    errors = [
        (matrix - phi_q.double() @ phi_k.double().mT).masked_fill(cells, 0).square().sum((-2, -1))
        for phi_q, phi_k in found
    ]
    best = torch.stack(errors).argmin(0)
    phi_q, phi_k = (torch.stack(list(side)) for side in zip(*found, strict=True))
    matrices = torch.arange(len(matrix), device=matrix.device)
    return phi_q[best, matrices], phi_k[best, matrices]


def _beside(matrix: Tensor, cells: Tensor, rank: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Kept cells are filled with what the factors say, and the factors are found anew.

    From one step to the next the rows of the factors turn a little, so that a step of subspace
    iteration follows them, where a full SVD would take as long as all of these. It never holds less
    of the filled matrix than before, and the error outside never grows.
    """
    filled = torch.where(cells, start, matrix)
    basis = robust_svd(filled, vectors=True)[2][..., :rank]
    for _ in range(REFINEMENTS):
        filled = torch.where(cells, filled @ basis @ basis.mT, matrix)
        basis = torch.linalg.qr(filled.mT @ (filled @ basis)).Q
    u, values, v = robust_svd(filled @ basis, vectors=True)
    return balanced(u, values, basis @ v)

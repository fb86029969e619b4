"""Low rank plus a diagonal: for biases with a value of their own where a token meets itself.

Such a value is of full rank, and an SVD spends its columns on it; the limitations section of the
FlashBias paper proposes to give it a term of its own. Wanted are a matrix L of rank R and a
diagonal d with the least || centred(bias - diag(d)) - L ||, where `centred` subtracts from every
row its mean. Softmax ignores row constants, also those that come with the diagonal, whose centred
rows are d[i] * (unit[i] - mean of unit[i]).

For fixed d the best L is a truncated SVD. For fixed L the best d is read off the residual, but
alternating between the two crawls where L can imitate a part of the diagonal. So d is fitted while
L keeps its column and row spaces and is free inside them: a Gauss-Newton step, one linear system
of N unknowns, which reaches rounding in three steps where the bias is exactly of this form. After
every step there is an SVD, and the best d of all is kept: never worse than the same rank without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import chunks
from .costs import SMALLEST_BUCKET
from .energy import allowed_tail, tail_energy
from .loss import row_center
from .robust_svd import centred, check_bias, check_size, robust_svd
from .svd import TruncatedSVD, assemble, balanced_factors, most_columns

#: SVDs from each of two starts; the first one looks at the start itself.
ITERATIONS = 4
#: Added to the linear systems, relative to their mean and to a unit diagonal: a direction that the
#: factors can imitate stays where it is.
RIDGE, LEAST_RIDGE = 1e-10, 1e-12


@torch.no_grad()
def truncated_svd_with_diagonal(
    bias: Tensor,
    *,
    energy: float,
    most: Sequence[int | None],
    max_rank: int | None = None,
    visible: Tensor | None = None,
    fill: bool = False,
) -> tuple[list[int], TruncatedSVD] | None:
    """Factors and a diagonal that together keep `energy`, for the heads where a low rank does.

    Each rank that is tried costs eight SVDs of a head or more.

    Args:
        bias: floating point of any precision, shape (*batch, H, N, N), on any device; the work is
            done there, in float64.
        energy: share of the squared singular values of the row-centred bias to keep, in (0, 1).
        most: for each head the largest rank that is worth having; None: do not try.
        max_rank: cap, also for filling.
        visible: bool, shape (N, N); see `svd.spectrum`.
        fill: raise each rank to what a kernel computes with anyway.

    Returns:
        The heads that reach the energy, and their factors and diagonals; None if there are none. A
        head has one rank for the whole batch. A bias that is a diagonal has rank 0.

    Raises:
        DecompositionError: NaN or infinity, an absurd size, or an SVD that never converges.
        ValueError: the matrices are not square.
    """
    n, m = bias.shape[-2:]
    if n != m:
        raise ValueError(f"a diagonal needs square matrices, got {n} x {m}")
    check_size(bias)
    check_bias(bias)
    # what a 1 on the diagonal adds to the centred rows; also where the diagonal is hidden, since
    # hidden cells stay part of the matrix
    unit = row_center(torch.eye(n, dtype=torch.float64, device=bias.device), visible)
    by_head = bias.reshape(-1, *bias.shape[-3:])
    heads, found = [], []
    for head, limit in enumerate(most):
        if limit is None:
            continue
        matrix = centred(by_head[:, head], True, visible)
        limit = min(limit, n, n if max_rank is None else max_rank)
        allowed = allowed_tail(matrix.square().sum((-2, -1)), energy)
        fit = _lowest_rank(matrix, unit, allowed, limit)
        if fit is not None:
            heads.append(head)
            found.append(_cut(matrix, unit, *fit, max_rank if fill else 0))
    if not found:
        return None
    pieces, needed, errors, diagonals = zip(*found, strict=True)
    lead = bias.shape[:-3]
    svd = assemble(pieces, needed, torch.stack(errors, -1), lead)
    diagonal = torch.stack(diagonals, 1).float().reshape(*lead, len(heads), n)
    return heads, TruncatedSVD(svd.term, svd.needed, svd.errors, diagonal)


def _lowest_rank(
    matrix: Tensor, unit: Tensor, allowed: Tensor, most: int
) -> tuple[int, Tensor] | None:
    """The lowest rank up to `most` that leaves no more than is allowed, and its diagonal (B, N).

    First as a kernel pads ranks, since most biases reach none of these; then by bisection, since
    a diagonal beside more columns than needed is arbitrary, and some columns count three times.
    """
    without = _diagonal_of(matrix, unit)
    missed = -1
    for rank in _ranks(most):
        diagonal, tail = best_diagonal(matrix, unit, rank, (torch.zeros_like(without), without))
        if (tail <= allowed).all():
            break
        missed = rank
    else:
        return None
    while rank - missed > 1:
        middle = (rank + missed) // 2
        other, tail = best_diagonal(matrix, unit, middle, (diagonal, without))
        if (tail <= allowed).all():
            rank, diagonal = middle, other
        else:
            missed = middle
    return rank, best_diagonal(matrix, unit, rank, (diagonal,))[0]  # a few steps further


def _cut(
    matrix: Tensor, unit: Tensor, rank: int, diagonal: Tensor, fill_to: int | None
) -> tuple[tuple[Tensor, Tensor], int, Tensor, Tensor]:
    """One head's columns (B, N, r), the rank needed, its error (B,) and the diagonal (B, N).

    Args:
        fill_to: cap for filling; None means none, 0 do not fill.
    """
    phi_q, phi_k, values = _factors(matrix, unit, diagonal)
    columns = rank if fill_to == 0 else most_columns(rank, values, fill_to)
    error = (tail_energy(values)[..., rank] / unit.numel()).sqrt()
    return (phi_q[..., :columns].clone(), phi_k[..., :columns].clone()), rank, error, diagonal


def _ranks(most: int) -> list[int]:
    """0, 16, 32, 64, ... up to and with `most`."""
    ranks, bucket = [0], SMALLEST_BUCKET
    while ranks[-1] < most:
        ranks.append(min(bucket, most))
        bucket *= 2
    return ranks


def best_diagonal(
    matrix: Tensor, unit: Tensor, rank: int, starts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The diagonal that leaves the least to lose at a rank, and that loss.

    Args:
        matrix: row-centred bias, float64, shape (B, N, N).
        unit: what a 1 on the diagonal adds to the centred rows, float64, shape (N, N).
        rank: of the factors.
        starts: diagonals (B, N) to begin with; the result is at least as good as any of them.

    Returns:
        Diagonals (B, N), and the energy (B,) that factors of this rank leave of the rest.
    """
    parts = [
        _search(matrix[part], unit, rank, [start[part] for start in starts])
        for part in chunks(len(matrix), unit.numel(), matrix.device)
    ]
    diagonal, tail = (torch.cat(x) for x in zip(*parts, strict=True))
    return diagonal, tail


def _search(
    matrix: Tensor, unit: Tensor, rank: int, starts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    best, least = starts[0], torch.full_like(matrix[:, 0, 0], torch.inf)
    for diagonal in starts:
        for iteration in range(ITERATIONS):
            u, values, v = robust_svd(matrix - diagonal[..., None] * unit, vectors=True)
            tail = tail_energy(values)[..., rank]
            better = tail < least
            best = torch.where(better[:, None], diagonal, best)
            least = torch.where(better, tail, least)
            if iteration + 1 < ITERATIONS:
                diagonal = diagonal + _step(u, values, v, unit, rank)
    return best, least


def _diagonal_of(matrix: Tensor, unit: Tensor) -> Tensor:
    """The best diagonal without any factors: as if the bias had no value there."""
    size = unit.square().sum(-1)
    return (matrix * unit).sum(-1) / size.where(size > 0, torch.ones_like(size))


def _step(u: Tensor, values: Tensor, v: Tensor, unit: Tensor, rank: int) -> Tensor:
    """How to change the diagonal (B, N) if the factors keep their spaces and are free in them."""
    kept_u, kept_v = u[..., :rank], v[..., :rank]
    rest = (u[..., rank:] * values[..., None, rank:]) @ v[..., rank:].mT
    beyond_v = unit - (unit @ kept_v) @ kept_v.mT  # (B, N, N): what the row space cannot imitate
    beyond_u = torch.eye(len(unit), dtype=unit.dtype, device=unit.device) - kept_u @ kept_u.mT
    gram = beyond_u * (beyond_v @ unit.mT)
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + LEAST_RIDGE
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge[:, None])
    return torch.linalg.solve(gram, (rest * beyond_v).sum(-1))


def _factors(matrix: Tensor, unit: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns and singular values of what the diagonal leaves; see `svd.balanced_factors`."""
    parts = [
        balanced_factors(matrix[part] - diagonal[part][..., None] * unit)
        for part in chunks(len(matrix), unit.numel(), matrix.device)
    ]
    phi_q, phi_k, values = (torch.cat(x) for x in zip(*parts, strict=True))
    return phi_q, phi_k, values

"""Low-rank factors by singular value decomposition (FlashBias, section 3.2).

The paper truncates the bias itself. Here the bias is centred along its rows first, since softmax
ignores a constant per row while such constants would eat most of the energy: a rank that keeps
99 % of the *raw* energy of a trained SwinV2 loses accuracy that 99 % of the row-centred energy
keeps. `centre=False` gives the raw variant for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError, UsageError
from ..terms import LowRank
from .chunks import chunks
from .costs import rank_bucket
from .loss import row_center

#: Largest matrix that is decomposed: 16,384 x 16,384, 2 GiB in float64.
MAX_CELLS = 2**28
#: Relative rounding of fp16, half a unit in the last place.
FP16_ROUNDING = 2.0**-11
#: Share of the energy that is rounding of an fp32 bias and not worth a column.
FP32_ENERGY = 1e-12
#: Entries this close to a column's largest one count as equally large when the sign is fixed:
#: columns of symmetric windows hold +x and -x, and which is larger is an accident of rounding.
SIGN_TIE = 1e-6
#: From this many matrices on, and up to this size, a GPU finds eigenvectors instead.
MANY, SMALL = 16, 512


# -- numbers -------------------------------------------------------------------------------


@torch.no_grad()
def spectrum(bias: Tensor, *, centre: bool = True, visible: Tensor | None = None) -> Tensor:
    """Singular values of every matrix.

    Args:
        bias: floating point of any precision, shape (*batch, H, N, M).
        centre: centre the rows first; False gives the raw spectrum, for comparison.
        visible: bool, shape (N, M): rows are centred over these keys. Cells that are hidden stay
            part of the matrix (to zero them would raise the rank of a smooth bias).

    Returns:
        float64, shape (*batch, H, min(N, M)), descending.

    Raises:
        DecompositionError: NaN or infinity, an absurd size, or an SVD that never converges.
    """
    check_size(bias)
    check_bias(bias)
    lead, (n, m) = bias.shape[:-2], bias.shape[-2:]
    flat = bias.reshape(-1, n, m)
    values = [
        robust_svd(centred(flat[part], centre, visible), vectors=False)[1]
        for part in chunks(len(flat), n * m)
    ]
    return torch.cat(values).reshape(*lead, min(n, m))


def cumulative_energy(singular_values: Tensor) -> Tensor:
    """Share of the energy that the first 1, 2, ... singular values hold.

    Energy is the sum of the *squared* singular values. A zero matrix has lost nothing: all ones.

    Args:
        singular_values: shape (..., K), in any order.

    Returns:
        float64, shape (..., K), ascending to exactly 1.
    """
    tail = tail_energy(_descending(singular_values))
    total = tail[..., :1]
    share = 1 - tail[..., 1:] / total.where(total > 0, torch.ones_like(total))
    return share.where(total > 0, torch.ones_like(share))


def rank_for_energy(singular_values: Tensor, energy: float) -> Tensor:
    """The smallest rank that keeps a share of the squared singular values.

    The tail that is cut off is summed from its small end and compared with what may be lost:
    near energy 1 the sum of what is kept could not resolve it. Singular values at the rounding
    error of the largest one count as zero, so energy 1.0 gives the numerical rank.

    Args:
        singular_values: shape (..., K), in any order.
        energy: share to keep, in (0, 1].

    Returns:
        int64, shape (...); 0 for a zero matrix, else at least 1.
    """
    if not 0.0 < energy <= 1.0:
        raise UsageError(f"energy must be in (0, 1], got {energy}")
    values = _descending(singular_values)
    count = values.shape[-1]
    floor = values[..., :1] * count * torch.finfo(torch.float64).eps
    values = values.where(values > floor, torch.zeros_like(values))
    tail = tail_energy(values)
    rank = (tail > allowed_tail(tail[..., :1], energy)).sum(-1)
    return torch.maximum(rank, (values[..., 0] > 0).long())


def allowed_tail(total: Tensor, energy: float) -> Tensor:
    """The energy that may be lost of a total, in any shape."""
    # 1 - 0.9 is a rounding error short of 0.1; a tail of exactly 0.1 may still be cut
    return (1 - energy) * total * (1 + 1e-9)


def _descending(singular_values: Tensor) -> Tensor:
    return singular_values.double().sort(-1, descending=True).values


def tail_energy(descending: Tensor) -> Tensor:
    """Energy left after the first 0, 1, ..., K values: shape (..., K + 1)."""
    energy = descending.square()
    tail = energy.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([tail, torch.zeros_like(tail[..., :1])], -1)


# -- factors -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TruncatedSVD:
    """Factors, and what was known when they were cut.

    Attributes:
        term: the factors of all heads.
        needed: the rank at which each head keeps the energy (or the cap).
        errors: root mean square logit error at those ranks, float64, shape (B, H).
        diagonal: fp32 (*batch, H, N), what the factors leave to a diagonal; None means nothing.
    """

    term: LowRank
    needed: tuple[int, ...]
    errors: Tensor
    diagonal: Tensor | None = None


def svd_factors(
    bias: Tensor,
    *,
    energy: float = 0.99,
    max_rank: int | None = None,
    visible: Tensor | None = None,
    centre: bool = True,
    fill: bool = False,
) -> LowRank:
    """Truncate each head at the smallest rank that keeps `energy`.

    Columns are balanced: phi_q = U sqrt(S), phi_k = V sqrt(S). In every phi_k column the entry
    of largest magnitude is positive (the first of them, among equals), so that the same bias
    gives the same file.

    Args:
        bias: floating point of any precision, shape (*batch, H, N, M), on any device; the work
            is done there, in float64.
        energy: share of the squared singular values to keep, in (0, 1].
        max_rank: cap; a head that needs more is cut there and keeps less energy.
        visible: bool, shape (N, M); see `spectrum`.
        centre: centre the rows first; False decomposes the raw bias as the paper does.
        fill: raise each rank to what a kernel computes with anyway (16, 32, 64, ... columns).

    Returns:
        One term for all heads, fp32 factors on the device of `bias`. A head has one rank for the
        whole batch, the largest that any entry needs; columns past it are zero. A zero bias has
        rank 0. `split` follows `split_columns`.

    Raises:
        DecompositionError: NaN or infinity, an absurd size, or an SVD that never converges.
    """
    return truncated_svd(
        bias, energy=energy, max_rank=max_rank, visible=visible, centre=centre, fill=fill
    ).term


@torch.no_grad()
def truncated_svd(
    bias: Tensor,
    *,
    energy: float,
    max_rank: int | None = None,
    visible: Tensor | None = None,
    centre: bool = True,
    fill: bool = False,
) -> TruncatedSVD:
    """`svd_factors`, with the ranks and errors before filling. Same arguments and errors."""
    check_size(bias)
    check_bias(bias)
    n, m = bias.shape[-2:]
    by_head = bias.reshape(-1, *bias.shape[-3:])
    needed, pieces, errors = [], [], []
    for head in range(bias.shape[-3]):
        phi_q, phi_k, values = _head_factors(by_head[:, head], centre, visible)
        rank = int(rank_for_energy(values, energy).max())
        rank = rank if max_rank is None else min(rank, max_rank)
        # columns that filling may take; clone: a view would keep all columns of this head alive
        most = most_columns(rank, values, max_rank) if fill else rank
        pieces.append((phi_q[..., :most].clone(), phi_k[..., :most].clone()))
        errors.append((tail_energy(values)[..., rank] / (n * m)).sqrt())
        needed.append(rank)
    return assemble(pieces, needed, torch.stack(errors, -1), bias.shape[:-3])


def assemble(
    pieces: Sequence[tuple[Tensor, Tensor]], needed: Sequence[int], rms: Tensor, lead: Sequence[int]
) -> TruncatedSVD:
    """Factors of heads side by side, their ranks filled as far as their columns reach.

    Args:
        pieces: for each head fp32 columns (B, N, r) and (B, M, r), at least as many as needed.
        needed: the rank of each head.
        rms: root mean square logit error at those ranks, float64, shape (B, H).
        lead: the batch dimensions that B stands for.
    """
    kept = [(q[..., :r], k[..., :r]) for (q, k), r in zip(pieces, needed, strict=True)]
    phi_q, phi_k = (_stack(list(side)) for side in zip(*kept, strict=True))
    split = split_columns(phi_q, phi_k, rms)
    ranks = [filled_rank(r, split, q.shape[-1]) for r, (q, _) in zip(needed, pieces, strict=True)]
    kept = [(q[..., :r], k[..., :r]) for (q, k), r in zip(pieces, ranks, strict=True)]
    phi_q, phi_k = (_stack(list(side)) for side in zip(*kept, strict=True))
    term = LowRank(
        phi_q=phi_q.reshape(*lead, *phi_q.shape[-3:]),
        phi_k=phi_k.reshape(*lead, *phi_k.shape[-3:]),
        ranks=tuple(ranks),
        split=split,
    )
    return TruncatedSVD(term, tuple(needed), rms)


def most_columns(rank: int, values: Tensor, max_rank: int | None) -> int:
    """How many columns filling may take: no more than a bucket, the cap or the matrix has.

    If every column of this rank is split, the bucket holds three times the rank.
    """
    numerical_rank = int(rank_for_energy(values, 1 - FP32_ENERGY).max())
    most = min(rank_bucket(3 * rank), numerical_rank)
    return max(rank, most if max_rank is None else min(most, max_rank))


def filled_rank(needed: int, split: int, most: int) -> int:
    """The largest rank, at most `most`, that costs a kernel no more than `needed` does.

    A split column takes three columns of the kernel, and those come in buckets.
    """
    columns = rank_bucket(needed + 2 * min(split, needed))
    return max(needed, min(most, columns - 2 * split))


def split_columns(phi_q: Tensor, phi_k: Tensor, rms_error: Tensor) -> int:
    """How many leading columns half precision must carry as a high and a low part.

    Rounding column r to fp16 moves a logit by at most about
    2 * 2**-11 * max|phi_q[:, r]| * max|phi_k[:, r]|. A column needs splitting where that exceeds
    max(2**-11, an eighth of the logit error that the truncation makes anyway).

    Args:
        phi_q: shape (*batch, H, N, R).
        phi_k: shape (*batch, H, M, R).
        rms_error: root mean square logit error of the truncation, broadcasts to (*batch, H).

    Returns:
        The position after the last column that needs it, over all matrices; 0 if none does.
    """
    if phi_q.shape[-1] == 0:
        return 0
    rounding = 2 * FP16_ROUNDING * phi_q.abs().amax(-2).double() * phi_k.abs().amax(-2).double()
    budget = (rms_error.double() / 8).clamp(min=FP16_ROUNDING)
    exceeds = (rounding > budget[..., None]).flatten(0, -2).any(0)
    return int(exceeds.nonzero().max()) + 1 if exceeds.any() else 0


def _head_factors(
    bias: Tensor, centre: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All columns of one head: fp32 (B, N, K) and (B, M, K), float64 values (B, K)."""
    parts = []
    for part in chunks(len(bias), bias.shape[-2] * bias.shape[-1]):
        parts.append(balanced_factors(centred(bias[part], centre, visible)))
    phi_q, phi_k, values = (torch.cat(x) for x in zip(*parts, strict=True))
    return phi_q, phi_k, values


def balanced_factors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All columns of float64 matrices: fp32 (B, N, K) and (B, M, K), float64 values (B, K)."""
    u, values, v = robust_svd(matrix, vectors=True)
    sign = _column_signs(v) * values.sqrt()[..., None, :]
    return (u * sign).float(), (v * sign).float(), values


def _column_signs(v: Tensor) -> Tensor:
    """+1 or -1 per column of (B, M, K), shape (B, 1, K); see `SIGN_TIE`."""
    size = v.abs()
    largest = size >= size.amax(-2, keepdim=True) * (1 - SIGN_TIE)
    first = largest.long().argmax(-2, keepdim=True)  # argmax takes the first of equals
    return torch.where(v.gather(-2, first) < 0, -1.0, 1.0).to(v.dtype)


def _stack(columns: list[Tensor]) -> Tensor:
    """Put heads of different ranks side by side: (B, N, r) each -> (B, H, N, R)."""
    rank = max(c.shape[-1] for c in columns)
    padded = [torch.nn.functional.pad(c, (0, rank - c.shape[-1])) for c in columns]
    return torch.stack(padded, dim=1).contiguous()


# -- the decomposition itself --------------------------------------------------------------


def check_bias(bias: Tensor, name: str = "") -> None:
    """Raise DecompositionError unless `bias` is finite and has the right shape.

    Args:
        bias: expected floating point, shape (*batch, H, N, M).
        name: the site, for the message.
    """
    site = f" of {name}" if name else ""
    if bias.dim() < 3 or not bias.is_floating_point() or 0 in bias.shape:
        raise DecompositionError(
            f"the bias{site} must be floating point of shape (*batch, H, N, M) without empty "
            f"dimensions, got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    flat = bias.reshape(-1, *bias.shape[-2:])
    parts = chunks(len(flat), flat[0].numel())
    bad = sum(int((~flat[part].isfinite()).sum()) for part in parts)
    if bad:
        raise DecompositionError(
            f"the bias{site} holds {bad} entries that are NaN or infinite",
            "a mask must be passed as a mask, not inside the bias; is a weight broken?",
        )


def check_size(bias: Tensor, name: str = "") -> None:
    """Raise DecompositionError if a matrix of `bias` is too large for an SVD."""
    n, m = bias.shape[-2:]
    if n * m > MAX_CELLS:
        site = f" of {name}" if name else ""
        raise DecompositionError(
            f"the bias{site} is a matrix of {n} x {m}, an SVD takes at most {MAX_CELLS} entries",
            "use a closed form, a relative table or a factor network for this length",
        )


def centred(bias: Tensor, centre: bool, visible: Tensor | None) -> Tensor:
    """float64, since no SVD exists for half precision; centred if asked for."""
    return row_center(bias.double(), visible) if centre else bias.double()


def robust_svd(matrix: Tensor, vectors: bool) -> tuple[Tensor, Tensor, Tensor]:
    """U (B, N, K), S (B, K) descending, V (B, M, K); U and V are empty without `vectors`.

    Drivers on a GPU fail to converge for repeated singular values and for nearly rank-one
    matrices of huge range that the CPU's handle; the eigenvectors of the Gram matrix, which
    resolve singular values down to 1e-8 of the largest, are the last resort.
    """
    attempts = (
        lambda: _svd_by_gram(matrix) if _is_many_small(matrix) else _svd(matrix, vectors),
        lambda: _svd(matrix.cpu(), vectors),
        lambda: _svd_by_gram(matrix.cpu()),
    )
    failure: Exception | None = None
    for attempt in attempts:
        try:
            u, s, v = attempt()
        except torch.linalg.LinAlgError as error:
            failure = error
            continue
        if s.isfinite().all():
            u, s, v = _in_order(u, s, v)
            return u.to(matrix.device), s.to(matrix.device), v.to(matrix.device)
    raise DecompositionError(
        f"the singular value decomposition of a {matrix.shape[-2]} x {matrix.shape[-1]} bias did "
        f"not converge: {failure or 'it returned values that are not finite'}",
        'leave this site as it is, or use method="exact"',
    ) from failure


def _is_many_small(matrix: Tensor) -> bool:
    """Whether eigenvectors come much faster: cuSOLVER has a batched driver for those alone."""
    *lead, n, m = matrix.shape
    return matrix.is_cuda and math.prod(lead) >= MANY and min(n, m) <= SMALL


def _svd(matrix: Tensor, vectors: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not vectors:
        empty = matrix.new_zeros(0)
        return empty, torch.linalg.svdvals(matrix), empty
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh.mT


def _svd_by_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD from the eigenvectors of the smaller of A A^T and A^T A."""
    if matrix.shape[-2] < matrix.shape[-1]:
        u, s, v = _svd_by_gram(matrix.mT)
        return v, s, u
    squares, v = torch.linalg.eigh(matrix.mT @ matrix)
    s = squares.clamp(min=0).sqrt()
    u = (matrix @ v) / s.where(s > 0, torch.ones_like(s))[..., None, :]
    return u, s, v


def _in_order(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort by descending singular value; most drivers promise that, not all kept it."""
    if (s[..., :-1] >= s[..., 1:]).all():
        return u, s, v
    s, order = s.sort(-1, descending=True)
    if not u.numel():
        return u, s, v
    u, v = (x.gather(-1, order[..., None, :].expand_as(x)) for x in (u, v))
    return u, s, v

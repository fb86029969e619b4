"""How much of a bias its first singular values hold, and how many of them an energy needs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError
from .chunks import chunks
from .robust_svd import centred, check_bias, check_size, robust_svd

#: Share of the energy that is rounding of an fp32 bias and not worth a column.
FP32_ENERGY = 1e-12


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
        for part in chunks(len(flat), n * m, bias.device)
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

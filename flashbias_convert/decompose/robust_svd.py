"""The singular value decomposition itself: of what is checked, and tried again where it fails."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import DecompositionError, NotFiniteError
from .chunks import chunks
from .loss import row_center

#: Largest matrix that is decomposed: 16,384 x 16,384, 2 GiB in float64.
MAX_CELLS = 2**28
#: From this many matrices on, and up to this size, a GPU finds eigenvectors instead.
MANY, SMALL = 16, 512


def check_bias(bias: Tensor, name: str = "") -> None:
    """Raise unless `bias` is finite and has the right shape.

    Args:
        bias: expected floating point, shape (*batch, H, N, M).
        name: the site, for the message.

    Raises:
        DecompositionError: another shape, or no numbers.
        NotFiniteError: NaN or infinity.
    """
    site = f" of {name}" if name else ""
    if bias.dim() < 3 or not bias.is_floating_point() or 0 in bias.shape:
        raise DecompositionError(
            f"the bias{site} must be floating point of shape (*batch, H, N, M) without empty "
            f"dimensions, got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    flat = bias.reshape(-1, *bias.shape[-2:])
    parts = chunks(len(flat), flat[0].numel(), bias.device)
    bad = int(sum((~flat[part].isfinite()).sum() for part in parts))  # waits for a card once
    if bad:
        raise NotFiniteError(
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
        lambda: svd_by_gram(matrix) if _is_many_small(matrix) else _svd(matrix, vectors),
        lambda: _svd(matrix.cpu(), vectors),
        lambda: svd_by_gram(matrix.cpu()),
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


def svd_by_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD from the eigenvectors of the smaller of A A^T and A^T A; values ascend.

    Values below 1e-8 of the largest, and their vectors, are noise.
    """
    if matrix.shape[-2] < matrix.shape[-1]:
        u, s, v = svd_by_gram(matrix.mT)
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

"""The leading singular vectors of many matrices at once, by a randomised SVD that a GPU does well.

Batched QR and SVD run matrix by matrix on a GPU. Here all matrices go through the same products,
Cholesky factorisations and triangular solves (CholeskyQR: Yamamoto et al., ETNA 44, 2015; shifted:
Fukaya et al., SIAM J. Sci. Comput. 42, 2020), and the small eigenvalue problem that is left is
solved where they are: LAPACK may be faster on an idle machine, but where loaders of data have its
cores its threads wait for each other, and take a hundred times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: passes over a matrix and its transpose (subspace iteration)
PASSES = 2
#: Columns of singular values below this share of the largest are zero: squares of float64 resolve
#: no others.
FLOOR = 1e-8


@dataclass(frozen=True, eq=False)
class Leading:
    """A basis of the leading left singular vectors, and how to turn it into them.

    Attributes:
        left: orthonormal columns Q, float64, (B, H, N, K). Where a matrix has less than K columns
            of rank, some are shorter, or zero.
        right: the transposed matrices times `left`, (B, H, M, K).
        turn: eigenvectors of the Gram matrix of `right`, float64, (B, H, K, K).
        values: singular values, float64, on the CPU, descending, (B, H, K).
        total: squared Frobenius norms of the matrices, float64, on the CPU, (B, H).
    """

    left: Tensor
    right: Tensor
    turn: Tensor
    values: Tensor
    total: Tensor

    def factors(self, columns: int) -> tuple[Tensor, Tensor]:
        """Balanced factors U sqrt(S) and V sqrt(S), fp32, (B, H, N, columns) and (B, H, M, ...)."""
        values = self.values[..., None, :columns].to(self.turn.device)
        root = values.where(values > FLOOR * values[..., :1], torch.zeros_like(values)).sqrt()
        inverse = torch.where(root > 0, 1 / root, torch.zeros_like(root))
        turn = self.turn[..., :columns]
        both = torch.cat([turn * root, turn * inverse], -1)
        sides = self.left @ both[..., :columns], self.right.double() @ both[..., columns:]
        return sides[0].float(), sides[1].float()


def leading(matrix: Tensor, size: int) -> Leading:
    """The leading singular vectors of every matrix.

    Draws are seeded, and the caller's random numbers stay what they were.

    Args:
        matrix: fp32 or float64, (B, H, N, M), finite.
        size: K, at most the smaller of N and M; the last of the vectors are the least exact.

    Raises:
        torch.linalg.LinAlgError: no method converges.
    """
    left, right = _subspace(matrix, size)
    wide = right.double()
    gram = wide.mT @ wide
    total = torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=torch.float64).square()
    finite = gram.isfinite().all().to(total.dtype)
    told = torch.cat([total.flatten(), finite[None]]).cpu()  # waits for all of the above
    total = told[:-1].view(total.shape)
    if told[-1]:
        with contextlib.suppress(torch.linalg.LinAlgError):
            squares, turn = torch.linalg.eigh(gram)  # ascending
            values = squares.cpu().flip(-1).clamp(min=0).sqrt()
            return Leading(left, right, turn.flip(-1), values, total)
    return _one_by_one(matrix, size, total)


def _subspace(matrix: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Q (B, H, N, K), float64, of orthonormal columns, and the transposed matrices times Q."""
    draw = torch.Generator(matrix.device).manual_seed(0)
    start = torch.randn(
        matrix.shape[-1], size, generator=draw, device=matrix.device, dtype=matrix.dtype
    )
    found = matrix @ start
    for _ in range(PASSES):
        # on the way it is enough that columns do not become alike
        back = matrix.mT @ orthonormal(found, times=1).to(matrix.dtype)
        found = matrix @ orthonormal(back, times=1).to(matrix.dtype)
    left = orthonormal(found, times=2)
    return left, matrix.mT @ left.to(matrix.dtype)


def orthonormal(columns: Tensor, times: int) -> Tensor:
    """Columns of the same span that are orthonormal, by shifted CholeskyQR in float64.

    The shift, at the rounding of the Gram matrix, is what keeps the factorisation from failing
    where columns depend on each other: those that are left over become short. fp32 columns come out
    within a few times of length 1 the first time, and to about 1e-9 of it the second.

    Args:
        columns: finite, (..., N, K).
        times: how often.

    Returns:
        float64, (..., N, K); not finite where the factorisation failed all the same.
    """
    columns = columns.double()
    precision = torch.finfo(torch.float64)
    for _ in range(times):
        gram = columns.mT @ columns
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        shift = sum(columns.shape[-2:]) * precision.eps * diagonal.sum(-1, keepdim=True)
        diagonal += shift.clamp(min=precision.tiny)  # of columns that are all zero
        lower = torch.linalg.cholesky_ex(gram).L  # without a look at whether it failed, which waits
        columns = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
    return columns


def _one_by_one(matrix: Tensor, size: int, total: Tensor) -> Leading:
    """The same by QR and SVD, which hold where squares do not."""
    with _own_random_numbers(matrix.device):
        u, values, v = torch.svd_lowrank(matrix, q=size, niter=PASSES)
    turn = torch.eye(size, dtype=torch.float64, device=matrix.device)
    turn = turn.expand(*matrix.shape[:-2], -1, -1)
    return Leading(u.double(), v * values[..., None, :], turn, values.double().cpu(), total)


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Seeded draws that leave the generators of the caller as they were, those of all devices."""
    own = torch.default_generator
    if device.type == "cuda":
        own = torch.cuda.default_generators[device.index]
    before = own.get_state()
    own.manual_seed(0)  # torch.manual_seed would seed every card
    try:
        yield
    finally:
        own.set_state(before)

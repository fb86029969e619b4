"""Low-rank factors by singular value decomposition (FlashBias, section 3.2).

The paper truncates the bias itself. Here the bias is centred along its rows first, since softmax
ignores a constant per row while such constants would eat most of the energy: a rank that keeps
99 % of the *raw* energy of a trained SwinV2 loses accuracy that 99 % of the row-centred energy
keeps. `centre=False` gives the raw variant for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..terms import LowRank
from .chunks import chunks
from .costs import rank_bucket
from .energy import FP32_ENERGY, rank_for_energy, tail_energy
from .robust_svd import centred, check_bias, check_size, robust_svd

#: Relative rounding of fp16, half a unit in the last place.
FP16_ROUNDING = 2.0**-11
#: Entries this close to a column's largest one count as equally large when the sign is fixed:
#: columns of symmetric windows hold +x and -x, and which is larger is an accident of rounding.
SIGN_TIE = 1e-6


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
    places = torch.arange(1, len(exceeds) + 1, device=exceeds.device)
    return int((exceeds * places).max())  # waits for a card once


def _head_factors(
    bias: Tensor, centre: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All columns of one head: fp32 (B, N, K) and (B, M, K), float64 values (B, K)."""
    parts = []
    for part in chunks(len(bias), bias.shape[-2] * bias.shape[-1], bias.device):
        parts.append(balanced_factors(centred(bias[part], centre, visible)))
    phi_q, phi_k, values = (torch.cat(x) for x in zip(*parts, strict=True))
    return phi_q, phi_k, values


def balanced_factors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All columns of float64 matrices: fp32 (B, N, K) and (B, M, K), float64 values (B, K)."""
    u, values, v = robust_svd(matrix, vectors=True)
    return (*balanced(u, values, v), values)


def balanced(u: Tensor, values: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 U sqrt(S) and V sqrt(S), with signs that do not depend on the driver."""
    sign = _column_signs(v) * values.sqrt()[..., None, :]
    return (u * sign).float(), (v * sign).float()


def _column_signs(v: Tensor) -> Tensor:
    """+1 or -1 per column of (B, M, K), shape (B, 1, K); see `SIGN_TIE`."""
    size = v.abs()
    largest = size >= size.amax(-2, keepdim=True) * (1 - SIGN_TIE)
    first = largest.long().argmax(-2, keepdim=True)  # argmax takes the first of equals
    return torch.where(v.gather(-2, first) < 0, -1.0, 1.0).to(v.dtype)


def _stack(columns: list[Tensor]) -> Tensor:
    """Put heads of different ranks side by side: (B, N, r) each -> (B, H, N, R)."""
    rank = max(c.shape[-1] for c in columns)
    padded = (
        c if c.shape[-1] == rank else torch.nn.functional.pad(c, (0, rank - c.shape[-1]))
        for c in columns
    )  # fmt: skip
    return torch.stack(tuple(padded), dim=1).contiguous()

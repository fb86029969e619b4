"""Factors in half precision: balanced columns, and columns split into a high and a low part.

Plain torch, which `factor_columns` does in one launch where the kernels run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..terms import LowRank

#: Scales smaller than this go into q, because factors divided by them could overflow.
SMALLEST_SCALE = 2.0**-8
#: The same for numbers in fp64: from here on they are no smaller in fp32, where kernels compare.
SMALLEST_NUMBER = SMALLEST_SCALE * (1 - 2.0**-25)
#: What stands for the scale in `pack` with cosine attention: the scale itself goes into q, and
#: scores are what 2 is raised to.
COSINE_UNIT = math.log(2)
#: Devices that have fp64.
WIDE_DEVICES = ("cpu", "cuda")
#: Quotients of largest entries that are beyond this are taken for this; its inverse is the smallest
#: normal number in fp32.
LARGEST_QUOTIENT = 2.0**126


def effective_factors(term: LowRank) -> tuple[Tensor, Tensor]:
    """phi_q (*batch, H, N, R) with ranks and row scale applied, and phi_k (*batch, H, M, R)."""
    phi_q = term.masked_phi_q()
    if term.row_scale is not None:
        phi_q = phi_q * term.row_scale[..., None]
    return phi_q, term.phi_k


def balance(
    phi_q: Tensor, phi_k: Tensor, tops: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Scale the columns of each matrix by powers of two so that both factors have like sizes.

    The products stay the same bit for bit (barring fp32 overflow), and both factors fit fp16 if
    their product does. Shapes (*batch, H, N, R) and (*batch, H, M, R). Nothing is read back from
    the device.

    Args:
        phi_q, phi_k: the factors.
        tops: their `column_tops`, if somebody has them already.
    """
    step = balance_step(*(tops or column_tops(phi_q, phi_k)))
    return phi_q * step, phi_k / step


def balance_step(top_q: Tensor, top_k: Tensor) -> Tensor:
    """What `balance` multiplies phi_q by, (..., 1, R): a power of two next to a square root.

    Where there is fp64 it is exactly that of the fp32 quotient of largest entries, on every device
    and in `triton_columns` alike: near half-way cases an fp32 logarithm may fall on either side.

    Args:
        top_q, top_k: see `column_tops`.
    """
    lead = min(top_q.dim(), top_k.dim())
    # leading dimensions that only one factor has are gone, so that the step fits the other one
    top_q, top_k = (top.reshape(top.shape[top.dim() - lead :]) for top in (top_q, top_k))
    usable = (top_q > 0) & (top_k > 0)
    ratio = (top_k / top_q.clamp_min(1 / LARGEST_QUOTIENT)).clamp(
        1 / LARGEST_QUOTIENT, LARGEST_QUOTIENT
    )
    ratio = ratio.where(usable, 1.0)
    if ratio.device.type not in WIDE_DEVICES:
        return torch.exp2(torch.round(0.5 * ratio.log2()))
    power = ratio.double().log2()
    # of powers of two, which lie half-way, not every device gives the logarithm exactly; those of
    # other quotients are no nearer to a whole number than 2**-24
    whole = power.round()
    power = whole.where((power - whole).abs() < 2.0**-30, power)
    return torch.exp2(torch.round(0.5 * power)).to(ratio.dtype)


def column_tops(phi_q: Tensor, phi_k: Tensor) -> tuple[Tensor, Tensor]:
    """Largest size of an entry by column of each factor, fp32 (fp64 for fp64) (..., 1, R).

    One for all matrices where the other factor is shared; all dimensions are kept. Of no entries
    it is 0.
    """
    return _column_top(phi_q, phi_k), _column_top(phi_k, phi_q)


def _column_top(phi: Tensor, other: Tensor) -> Tensor:
    own, shape = phi.shape, other.shape
    missing = len(own) - len(shape)
    shared = [
        i
        for i in range(len(own) - 2)
        if own[i] != 1 and (i < missing or shape[i - missing] == 1)
    ]  # fmt: skip
    dtype = phi.dtype if phi.dtype == torch.float64 else torch.float32
    if not phi.numel():  # of which torch has no largest one
        kept = [1 if i in (*shared, len(own) - 2) else size for i, size in enumerate(own)]
        return phi.new_zeros(kept, dtype=dtype)
    phi = phi.detach() if phi.requires_grad else phi
    return torch.linalg.vector_norm(phi, math.inf, (*shared, len(own) - 2), True, dtype=dtype)


def scale_size(scale: float) -> float:
    """What factors are divided by and the exponential multiplies again: |scale|, or 1."""
    return abs(scale) if abs(scale) >= SMALLEST_NUMBER else 1.0


def scale_sizes(scales: Tensor) -> Tensor:
    """`scale_size` of each number."""
    sizes = scales.abs()
    return torch.where(sizes < SMALLEST_SCALE, 1.0, sizes)


def high_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` as a sum of two tensors that `dtype` holds: relative error 2^-22 in fp16."""
    high = x.to(dtype)
    return high, (x - high.to(x.dtype)).to(dtype)


def split_columns(
    phi_q: Tensor, phi_k: Tensor, split: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round factors to `dtype`, the first `split` columns as a high and a low part.

    q k = (q_hi + q_lo) (k_hi + k_lo), of which the product of the two low parts is left out:
    each split column becomes the three columns (hi, hi, lo) and (hi, lo, hi).
    Shapes (..., R) -> (..., R + 2 * split).
    """
    if split == 0:
        return phi_q.to(dtype), phi_k.to(dtype)
    q_high, q_low = high_low(phi_q[..., :split], dtype)
    k_high, k_low = high_low(phi_k[..., :split], dtype)
    q_parts = torch.stack([q_high, q_high, q_low], -1).flatten(-2)
    k_parts = torch.stack([k_high, k_low, k_high], -1).flatten(-2)
    if split == phi_q.shape[-1]:
        return q_parts, k_parts
    return (
        torch.cat([q_parts, phi_q[..., split:].to(dtype)], -1),
        torch.cat([k_parts, phi_k[..., split:].to(dtype)], -1),
    )

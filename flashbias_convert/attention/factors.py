"""Factors in half precision: balanced columns, and columns split into a high and a low part."""

from __future__ import annotations

import torch
from torch import Tensor

from ..terms import LowRank

#: Scales smaller than this go into q, because factors divided by them could overflow.
SMALLEST_SCALE = 2.0**-8


def effective_factors(term: LowRank) -> tuple[Tensor, Tensor]:
    """phi_q (*batch, H, N, R) with ranks and row scale applied, and phi_k (*batch, H, M, R)."""
    phi_q = term.masked_phi_q()
    if term.row_scale is not None:
        phi_q = phi_q * term.row_scale[..., None]
    return phi_q, term.phi_k


def balance(phi_q: Tensor, phi_k: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the columns of each matrix by powers of two so that both factors have like sizes.

    The products stay the same bit for bit (barring fp32 overflow), and both factors fit fp16 if
    their product does. Shapes (*batch, H, N, R) and (*batch, H, M, R). Nothing is read back from
    the device.
    """
    step = balance_step(phi_q, phi_k)
    return phi_q * step, phi_k / step


def balance_step(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """What `balance` multiplies phi_q by, (..., 1, R)."""
    top_q, top_k = _column_max(phi_q, phi_k), _column_max(phi_k, phi_q)
    usable = (top_q > 0) & (top_k > 0)
    ratio = torch.where(usable, top_k / top_q.clamp_min(1e-38), torch.ones_like(top_q))
    return torch.exp2(torch.round(0.5 * torch.log2(ratio)))


def _column_max(phi: Tensor, other: Tensor) -> Tensor:
    """Largest entry per column, (..., 1, R); one for all where the other factor is shared."""
    top = phi.detach().abs().amax(-2, keepdim=True)
    missing = top.dim() - other.dim()
    shape = (1,) * missing + tuple(other.shape) if missing > 0 else tuple(other.shape)[-top.dim() :]
    shared = [i for i in range(top.dim() - 2) if shape[i] == 1 and top.shape[i] > 1]
    top = top.amax(shared, keepdim=True) if shared else top
    # leading dimensions that only this factor has are gone, so that the step fits the other one
    return top.reshape(top.shape[max(missing, 0) :])


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
    q_high, q_low = high_low(phi_q[..., :split], dtype)
    k_high, k_low = high_low(phi_k[..., :split], dtype)
    q_parts = torch.stack([q_high, q_high, q_low], -1).flatten(-2)
    k_parts = torch.stack([k_high, k_low, k_high], -1).flatten(-2)
    return (
        torch.cat([q_parts, phi_q[..., split:].to(dtype)], -1),
        torch.cat([k_parts, phi_k[..., split:].to(dtype)], -1),
    )

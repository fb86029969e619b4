"""Features of single tokens from a pair representation, for factor networks."""

from __future__ import annotations

import torch
from torch import Tensor


def pair_features(
    pair: Tensor,
    single: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    diagonal: bool = False,
) -> Tensor:
    """Means over rows and columns of a pair representation, beside the single representation.

    The inputs of the factor networks of the FlashBias paper (appendix, "pair representation bias
    in AlphaFold 3"), which has the sum of the two where this has both.

    Args:
        pair: floating point, shape (*batch, N, N, C).
        single: shape (*batch, N, C'), or None.
        mask: bool, shape (*batch, N), False for padding, which counts for no mean.
        diagonal: also what a token says of itself, ``pair[i, i]``.

    Returns:
        fp32, shape (*batch, N, 2 C [+ C] [+ C']).
    """
    if mask is None:
        rows, columns = pair.mean(-2, dtype=torch.float32), pair.mean(-3, dtype=torch.float32)
    else:
        counts = mask.sum(-1).clamp(min=1).float()[..., None, None]
        seen = mask.to(pair.dtype)[..., None]  # (*batch, N, 1); ones and zeros are exact
        rows = (pair * seen[..., None, :, :]).sum(-2, dtype=torch.float32) / counts
        columns = (pair * seen[..., :, None, :]).sum(-3, dtype=torch.float32) / counts
    parts = [rows, columns]
    if diagonal:
        parts.append(pair.diagonal(dim1=-3, dim2=-2).mT.float())
    if single is not None:
        parts.append(single.float())
    return torch.cat(parts, -1)

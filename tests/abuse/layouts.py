"""The same values in other layouts of memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUTS = ("contiguous", "turned", "swapped", "every other", "shifted", "one head", "one batch")


def in_layout(x: Tensor, layout: str) -> Tensor:
    """`x` with other strides; "one head" and "one batch" repeat the first entry with stride 0."""
    if layout == "turned" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "swapped" and x.dim() > 2:
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "every other" and x.dim():
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]
    if layout == "shifted" and x.dim():
        return F.pad(x, (3, 2))[..., 3 : 3 + x.shape[-1]]
    if layout == "one head" and x.dim() > 2:
        return x.narrow(-3, 0, min(1, x.shape[-3])).expand(x.shape)
    if layout == "one batch" and x.dim() > 3:
        return x.narrow(0, 0, min(1, x.shape[0])).expand(x.shape)
    return x.contiguous()

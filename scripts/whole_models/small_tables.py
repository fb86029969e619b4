"""EfficientFormer, converted with its table exact, beside its original and SDPA with a dense bias.

Its attention has 49 tokens and a small table that the whole batch shares: little is gained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.efficientformer import Attention
from torch import Tensor, nn

from .case import EXACT, ORIGINAL, SDPA, Case, converted
from .given import images
from .hand import replace_children, with_aligned_rows
from .parts import Sizes, lively, of_timm

_WAYS, _MODES = (ORIGINAL, SDPA, EXACT), ("eager", "compiled")


class HandAttention(nn.Module):
    """The same class with its bias made once, as a dense matrix, and SDPA.

    Args:
        original: the module.
    """

    bias: Tensor

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.scale = original.qkv, original.proj, original.scale
        self.num_heads, self.key_dim, self.val_dim = (
            original.num_heads,
            original.key_dim,
            original.val_dim,
        )
        bias = original.attention_biases[:, original.attention_bias_idxs].detach()
        self.keys = bias.shape[-1]
        self.register_buffer("bias", with_aligned_rows(bias[None]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _split(self, x)
        bias = self.bias[..., : self.keys].expand(len(x), -1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
        found: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return found


def _split(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of (B, N, C): views, (B, H, N, D)."""
    heads = module.qkv(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    views: tuple[Tensor, ...] = heads.split([module.key_dim, module.key_dim, module.val_dim], -1)
    return views


def alter(model: nn.Module, way: str) -> nn.Module:
    """The model with attention by hand, or by the kernel."""
    if way == EXACT:
        return converted(model, EXACT)
    return replace_children(model, Attention, lambda attention, _: HandAttention(attention))


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the name of the command line."""
    s = Sizes(tiny)
    small: dict[str, Any] = {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32)}
    make, given = of_timm("efficientformer_l3", **(small if tiny else {})), images(224)

    def build(device: torch.device) -> nn.Module:
        return lively(make(), given).to(device)

    def inputs(_: Any, __: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        return given(count, device, dtype)

    # with fewer samples its host decides
    parts = (s.many, 49, _WAYS, build, inputs, alter, _MODES)
    return {"efficientformer": Case("efficientformer_l3, 224", *parts)}

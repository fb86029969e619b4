"""EfficientFormer of timm: a bias of absolute offsets over one small map."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import absolute_offsets, refuse_buffers


class EfficientFormerAttention(PatchedAttention):
    """timm's `Attention` of EfficientFormer; its cache of biases is not used."""

    num_heads: int
    scale: float
    key_dim: int
    val_dim: int
    attention_biases: nn.Parameter
    attention_bias_idxs: Tensor
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, self.attention_bias_idxs)  # checkpoints hold both

    def flashbias_forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)  # (B, H, N, D)
        out = self.score_bias(q, k, v, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    """The bias looked up as the module does; its index is made from absolute offsets.

    The module does not say how high and wide its map is: any that has so many tokens will do.
    """
    module: Any = site.module
    index = module.attention_bias_idxs
    n = len(index)
    maps = [absolute_offsets(n // width, width) for width in range(1, n + 1) if n % width == 0]
    if not any(torch.equal(index, offsets.to(index)) for offsets in maps):
        refuse_buffers()
    return Description(
        bias=module.attention_biases[:, index],
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.key_dim,
        index=index,
    )


recipe = Recipe(
    name="timm_efficientformer",
    title="EfficientFormer (timm)",
    classes=("timm.models.efficientformer.Attention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=EfficientFormerAttention,
    describe=describe,
    about=About(
        models="EfficientFormer, of which attention is a small part",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="49",
    ),
)

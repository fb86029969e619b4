"""TinyViT of timm: a bias of absolute offsets, and values wider than keys where asked for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import absolute_offsets, require_index


class TinyVitAttention(PatchedAttention):
    """timm's `Attention` of TinyViT; its cache of biases is not used."""

    num_heads: int
    scale: float
    key_dim: int
    val_dim: int
    resolution: tuple[int, int]
    attention_biases: nn.Parameter
    norm: nn.LayerNorm
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, tuple(self.resolution))

    def flashbias_forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)  # (B, H, N, D)
        out = self.score_bias(q, k, v, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    """The bias looked up as the module does; its index is made from absolute offsets."""
    module: Any = site.module
    index, (height, width) = module.attention_bias_idxs, module.resolution
    require_index(index, absolute_offsets(height, width))
    return Description(
        bias=module.attention_biases[:, index],
        num_heads=module.num_heads,
        n=len(index),
        m=len(index),
        head_dim=module.key_dim,
        index=index,
        shared=True,  # windows of a map, none of which has a mask
    )


recipe = Recipe(
    name="timm_tiny_vit",
    title="TinyViT (timm)",
    classes=("timm.models.tiny_vit.Attention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=TinyVitAttention,
    describe=describe,
    about=About(
        models="TinyViT",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 49 to 1024",
    ),
)

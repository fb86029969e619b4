"""LeViT of timm: a bias of absolute offsets, and downsampling by attention."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.maps import with_channels_last
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import absolute_offsets, require_index


class LevitAttention(PatchedAttention):
    """timm's `Attention` and `AttentionDownsample`; their cache of biases is not used."""

    num_heads: int
    scale: float
    key_dim: int
    val_dim: int
    resolution: tuple[int, int]
    use_conv: bool
    attention_biases: nn.Parameter
    proj: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, tuple(self.resolution), getattr(self, "stride", 1))

    def flashbias_forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C), or maps (B, C, H, W) with convolutions."""
        x = with_channels_last(x) if self.use_conv else x
        size, q, k, v = self._project(x)
        out = self.score_bias(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)  # (B, N, C)
        if self.use_conv:
            out = out.transpose(1, 2).unflatten(-1, size)
        projected: Tensor = self.proj(out)
        return projected

    def _project(self, x: Tensor) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
        """Size of the map that comes out, if it is one; then views, (B, H, N, D)."""
        own: Any = self
        if not hasattr(self, "kv"):
            qkv = own.qkv(x)
            sizes = [self.key_dim, self.key_dim, self.val_dim]
            return (qkv.shape[2:], *self._heads(qkv).split(sizes, -1))
        q = own.q(x)  # of every second row and column
        kv = self._heads(own.kv(x)).split([self.key_dim, self.val_dim], -1)
        return (q.shape[2:], self._heads(q), *kv)

    def _heads(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if self.use_conv else x
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def describe(site: Site) -> Description:
    """The bias looked up as the module does; its index is made from absolute offsets."""
    module: Any = site.module
    index, (height, width) = module.attention_bias_idxs, module.resolution
    require_index(index, absolute_offsets(height, width, getattr(module, "stride", 1)))
    n, m = index.shape
    return Description(
        bias=module.attention_biases[:, index],
        num_heads=module.num_heads,
        n=n,
        m=m,
        head_dim=module.key_dim,
        index=index,
    )


recipe = Recipe(
    name="timm_levit",
    title="LeViT (timm)",
    classes=("timm.models.levit.Attention", "timm.models.levit.AttentionDownsample"),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=LevitAttention,
    describe=describe,
    about=About(
        models="LeViT",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="16 to 196; where it downsamples, 16 x 49 and 49 x 196",
    ),
)

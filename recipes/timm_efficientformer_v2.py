"""EfficientFormer V2 of timm where it downsamples by attention; its other attention mixes heads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.maps import with_channels_last
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import absolute_offsets, require_index


class Attention2dDownsample(PatchedAttention):
    """timm's class of that name; its cache of biases is not used."""

    num_heads: int
    scale: float
    resolution: tuple[int, int]
    resolution2: tuple[int, int]
    attention_biases: nn.Parameter
    q: nn.Module
    k: nn.Module
    v: nn.Module
    v_local: nn.Module
    act: nn.Module
    proj: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, tuple(self.resolution))

    def flashbias_forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, H, W), of which every second row and column has a query."""
        x = with_channels_last(x)
        value = self.v(x)
        q, k, v = (self._heads(part) for part in (self.q(x), self.k(x), value))
        out = self.score_bias(q, k, v, scale=self.scale).mT.flatten(1, 2)  # (B, H Dv, N)
        out = out.unflatten(-1, self.resolution2) + self.v_local(value)
        projected: Tensor = self.proj(self.act(out))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.flatten(2).unflatten(1, (self.num_heads, -1)).mT  # a view, (B, H, N, D)


def describe(site: Site) -> Description:
    """The bias looked up as the module does; its index is made from absolute offsets."""
    module: Any = site.module
    index, (height, width) = module.attention_bias_idxs, module.resolution
    require_index(index, absolute_offsets(height, width, step=2))
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
    name="timm_efficientformer_v2",
    title="EfficientFormer V2, downsampling (timm)",
    classes=("timm.models.efficientformer_v2.Attention2dDownsample",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=Attention2dDownsample,
    describe=describe,
    about=About(
        models="EfficientFormer V2, its downsampling by attention",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="49 x 196",
    ),
)

"""Bottleneck attention of timm: all of a small map, its relative positions made of the queries."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.relative_positions import tables_of_offsets


class BottleneckAttention(PatchedAttention):
    """timm's `BottleneckAttn`, whose maps have their channels first."""

    bypassed = ("pos_embed",)  # its tables are read

    num_heads: int
    dim_out_qk: int
    dim_out_v: int
    scale: float
    scale_pos_embed: bool
    qkv: nn.Conv2d
    pos_embed: Any
    pool: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        sizes = [self.dim_out_qk, self.dim_out_qk, self.dim_out_v]
        parts = self.qkv(x).flatten(2).transpose(1, 2).contiguous().split(sizes, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        tables = tables_of_offsets(
            self.pos_embed, (height, width), (height, width),
            self.scale if self.scale_pos_embed else 1.0,
        )  # fmt: skip
        built = {"axial_rows": {"q": q, **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        out = out.transpose(1, 2).flatten(2).transpose(1, 2)  # (B, channels, H * W)
        return self.pool(out.unflatten(-1, (height, width)))


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module: Any = site.module
    n = module.pos_embed.height * module.pos_embed.width
    return Description(None, module.num_heads, n, n, module.dim_head_qk, builders=("axial_rows",))


recipe = Recipe(
    name="timm_bottleneck",
    title="Bottleneck attention (timm)",
    classes=("timm.layers.bottleneck_attn.BottleneckAttn",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=BottleneckAttention,
    describe=describe,
    about=About(
        models="BoTNet and other networks of timm's `byoanet` with bottleneck attention",
        exact="rows and columns of relative positions, made of the queries of each call",
        n="64 to 256",
    ),
)

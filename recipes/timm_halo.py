"""Halo attention of timm: blocks of queries, each with a halo of keys around it.

Keys beyond the edge of the map are zeros, and count, as in the original.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.relative_positions import tables_of_offsets


class HaloAttention(PatchedAttention):
    """timm's `HaloAttn`, whose maps have their channels first."""

    bypassed = ("pos_embed",)  # its tables are read

    num_heads: int
    dim_head_qk: int
    scale: float
    scale_pos_embed: bool
    block_size: int
    block_size_ds: int
    halo_size: int
    win_size: int
    q: nn.Conv2d
    kv: nn.Conv2d
    pos_embed: Any
    pool: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor) -> Tensor:
        side, window = self.block_size_ds, self.win_size
        q = self.q(x)
        q = q.unfold(2, side, side).unfold(3, side, side)
        kv = F.pad(self.kv(x), [self.halo_size] * 4)
        kv = kv.unfold(2, window, self.block_size).unfold(3, window, self.block_size)
        q, kv = self._by_blocks(q), self._by_blocks(kv)
        k, v = kv[..., : self.dim_head_qk], kv[..., self.dim_head_qk :]
        tables = tables_of_offsets(
            self.pos_embed, (side, side), (window, window),
            self.scale if self.scale_pos_embed else 1.0,
        )  # fmt: skip
        built = {"axial_rows": {"q": q, **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        blocks = [size // self.block_size for size in x.shape[2:]]
        out = out.unflatten(1, blocks).unflatten(-2, (side, side))  # (B, by, bx, H, y, x, D)
        out = out.permute(0, 3, 6, 1, 4, 2, 5).flatten(5).flatten(3, 4).flatten(1, 2)
        return self.pool(out)

    def _by_blocks(self, x: Tensor) -> Tensor:
        """(B, channels, by, bx, y, x) as (B, by * bx, heads, y * x, D)."""
        x = x.unflatten(1, (self.num_heads, -1)).permute(0, 3, 4, 1, 5, 6, 2)
        return x.flatten(4, 5).flatten(1, 2).contiguous()


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module: Any = site.module
    return Description(
        None, module.num_heads, module.block_size_ds**2, module.win_size**2,
        module.dim_head_qk, builders=("axial_rows",),
    )  # fmt: skip


recipe = Recipe(
    name="timm_halo",
    title="Halo attention (timm)",
    classes=("timm.layers.halo_attn.HaloAttn",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=HaloAttention,
    describe=describe,
    about=About(
        models="HaloNet and other networks of timm's `byoanet` with halo attention",
        exact="rows and columns of relative positions, made of the queries of each call",
        n="block: 16 x 100 to 64 x 196",
    ),
)

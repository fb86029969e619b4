"""MViTv2 of torchvision: pooled queries and keys of a video, three axes of relative positions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site

Size = tuple[int, int, int]


class MultiscaleAttention(PatchedAttention):
    """`MultiscaleAttention`; the bias and the shortcut take queries that are not scaled."""

    num_heads: int
    head_dim: int
    output_dim: int
    scaler: float
    residual_pool: bool
    residual_with_cls_embed: bool
    rel_pos_t: nn.Parameter
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    qkv: nn.Linear
    project: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor, thw: Size) -> tuple[Tensor, Size]:
        from torchvision.models.video import mvit

        batch, n = x.shape[:2]
        qkv = self.qkv(x).reshape(batch, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
        k, k_size = self._pooled("pool_k", k, thw)
        v, _ = self._pooled("pool_v", v, thw)
        q, q_size = self._pooled("pool_q", q, thw)
        tables: dict[str, Tensor] = {}
        axes = {"rel_t": self.rel_pos_t, "rel_h": self.rel_pos_h, "rel_w": self.rel_pos_w}
        for (name, table), queries, keys in zip(axes.items(), q_size, k_size, strict=True):
            table = mvit._interpolate(table, 2 * max(queries, keys) - 1)
            tables[name] = table[distances(queries, keys, x.device)]
        built = {"axial_rows_3d": {"q": q, "special": 1, **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scaler)
        if self.residual_pool:
            mvit._add_shortcut(out, q, self.residual_with_cls_embed)
        return self.project(out.transpose(1, 2).reshape(batch, -1, self.output_dim)), q_size

    def _pooled(self, name: str, x: Tensor, size: Size) -> tuple[Tensor, Size]:
        pool = self._modules[name]
        return (x, size) if pool is None else pool(x, size)


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Places in a table of relative positions, (queries, keys); the coarser axis is stretched."""
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    i = torch.arange(queries, device=device)[:, None] * q_step
    j = torch.arange(keys, device=device)[None, :] + (1.0 - keys)
    return (i - j * k_step).long()


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module: Any = site.module
    if module.rel_pos_h is None:
        raise NoBias("it has no relative positions")
    strides = [(1, 1, 1) if p is None else p.pool.stride for p in (module.pool_q, module.pool_k)]
    side = (len(module.rel_pos_h) + 1) // 2 * min(stride[1] for stride in strides)  # of the map
    frames = (len(module.rel_pos_t) + 1) // 2
    n, m = (-(-frames // t) * -(-side // h) * -(-side // w) + 1 for t, h, w in strides)
    return Description(None, module.num_heads, n, m, module.head_dim, builders=("axial_rows_3d",))


recipe = Recipe(
    name="torchvision_mvit",
    title="MViTv2 (torchvision)",
    classes=("torchvision.models.video.mvit.MultiscaleAttention",),
    library="torchvision",
    tested=">=0.29,<0.30",
    attention=MultiscaleAttention,
    describe=describe,
    about=About(
        models="MViTv2 for video; MViT v1 has no relative positions and is left alone",
        exact="frames, rows and columns of relative positions, made of the queries of each call",
        n="25089 x 393 to 393 x 393",
    ),
)

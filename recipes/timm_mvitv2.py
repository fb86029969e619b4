"""MViTv2 of timm: pooled queries and keys, relative positions decomposed into two axes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site

Size = list[int]


class MultiScaleAttention(PatchedAttention):
    """timm's `MultiScaleAttention`; the bias and the residual take queries that are not scaled."""

    num_heads: int
    dim_out: int
    scale: float
    has_cls_token: bool
    residual_pooling: bool
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor, feat_size: Size) -> tuple[Tensor, Size]:
        batch, n = x.shape[:2]
        qkv = self.qkv(x).reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # (B, H, N, D)
        q, q_size = self._pooled(q, feat_size, "q")
        k, k_size = self._pooled(k, feat_size, "k")
        v, _ = self._pooled(v, feat_size, "v")
        tables = {
            "rel_h": self.rel_pos_h[_distances(q_size[0], k_size[0], q.device)],
            "rel_w": self.rel_pos_w[_distances(q_size[1], k_size[1], q.device)],
        }
        built = {"axial_rows": {"q": q, "special": int(self.has_cls_token), **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        if self.residual_pooling:
            out = out + q
        return self.proj(out.transpose(1, 2).reshape(batch, -1, self.dim_out)), q_size

    def _pooled(self, x: Tensor, feat_size: Size, which: str) -> tuple[Tensor, Size]:
        from timm.models.mvitv2 import reshape_post_pool, reshape_pre_pool

        pool, norm = getattr(self, f"pool_{which}"), getattr(self, f"norm_{which}")
        size = feat_size
        if pool is not None:
            x, token = reshape_pre_pool(x, feat_size, self.has_cls_token)
            x, size = reshape_post_pool(pool(x), self.num_heads, token)
        return (x if norm is None else norm(x)), size


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Places in a table of relative positions, (queries, keys); the coarser axis is stretched."""
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    i = torch.arange(queries, device=device)[:, None] * q_step
    j = torch.arange(keys, device=device) * k_step
    return (i - j + (keys - 1) * k_step).long()


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module: Any = site.module
    if module.rel_pos_type != "spatial":
        raise NoBias("it uses no relative positions")
    pools = (module.pool_q, module.pool_k)
    q_stride, k_stride = (1 if pool is None else _stride(pool) for pool in pools)
    side = (len(module.rel_pos_h) + 1) // 2 * min(q_stride, k_stride)  # of the map
    n, m = ((side // s) ** 2 + int(module.has_cls_token) for s in (q_stride, k_stride))
    return Description(None, module.num_heads, n, m, module.head_dim, builders=("axial_rows",))


def _stride(pool: Any) -> int:
    return int(pool.stride if isinstance(pool.stride, int) else pool.stride[0])


recipe = Recipe(
    name="timm_mvitv2",
    title="MViTv2 (timm)",
    classes=("timm.models.mvitv2.MultiScaleAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=MultiScaleAttention,
    describe=describe,
    about=About(
        models="MViTv2, with and without a class token",
        exact="rows and columns of relative positions, made of the queries of each call",
        n="3136 x 196 to 49 x 49",
    ),
)

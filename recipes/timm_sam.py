"""SAM's image encoder of timm: relative positions decomposed into two axes."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site


class SamAttention(PatchedAttention):
    """timm's `Attention` of SAM; the bias is made of queries that are normed but not scaled."""

    bypassed = ("attn_drop",)

    num_heads: int
    scale: float
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor) -> Tensor:
        from timm.models.vision_transformer_sam import get_rel_pos

        height, width = x.shape[1:3]
        qkv = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # views, (B, heads, H * W, D)
        q, k = self.q_norm(q), self.k_norm(k)
        tables = {
            "rel_h": get_rel_pos(height, height, self.rel_pos_h),
            "rel_w": get_rel_pos(width, width, self.rel_pos_w),
        }
        built = {"axial_rows": {"q": q, **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        out = self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        return out.unflatten(1, (height, width))


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module = site.module
    if not module.use_rel_pos:
        raise NoBias("it uses no relative positions")
    rel_h, rel_w, heads = module.rel_pos_h, module.rel_pos_w, module.num_heads
    assert isinstance(rel_h, Tensor) and isinstance(rel_w, Tensor) and isinstance(heads, int)
    n = ((len(rel_h) + 1) // 2) * ((len(rel_w) + 1) // 2)
    return Description(None, heads, n, n, rel_h.shape[-1], builders=("axial_rows",))


recipe = Recipe(
    name="timm_sam",
    title="SAM's image encoder (timm)",
    classes=("timm.models.vision_transformer_sam.Attention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=SamAttention,
    describe=describe,
    about=About(
        models="SAM's image encoder",
        exact="rows and columns of relative positions, made of the queries of each call",
        n="196 and 4096",
    ),
)

"""GCViT of timm: attention in windows, every other block with queries of the whole image."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import require_own_buffers


class GlobalWindowAttention(PatchedAttention):
    """timm's `WindowAttentionGlobal`; no window is shifted, so there is no mask."""

    bypassed = ("rel_pos", "attn_drop")

    num_heads: int
    head_dim: int
    scale: float
    use_global: bool
    rel_pos: nn.Module
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        source: Any = self.rel_pos
        return (source.relative_position_bias_table, tuple(source.window_size))

    def flashbias_forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        made = self.qkv(x).reshape(windows, n, -1, self.num_heads, self.head_dim)
        *q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)  # views, (B * nW, H, N, D)
        if self.use_global and q_global is not None:
            # all windows of an image, which stand together, have the same queries
            each = q_global.repeat_interleave(windows // len(q_global), dim=0)
            q = [each.reshape(windows, n, self.num_heads, self.head_dim).transpose(1, 2)]
        out = self.score_bias(q[0], k, v, scale=self.scale).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(out))


def describe(site: Site) -> Description:
    """The bias by the module's own look-up."""
    module: Any = site.module
    source = module.rel_pos
    require_own_buffers(source)
    n = source.window_area
    return Description(
        bias=source.get_bias()[0],
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.head_dim,
        index=source.relative_position_index.view(n, n),
    )


recipe = Recipe(
    name="timm_gcvit",
    title="GCViT (timm)",
    classes=("timm.models.gcvit.WindowAttentionGlobal",),
    library="timm",
    tested=">=1.0.31,<1.1",
    attention=GlobalWindowAttention,
    describe=describe,
    about=About(
        models="GCViT: blocks with queries of their own, and with those of the image",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 49, 196",
    ),
)

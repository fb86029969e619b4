"""Swin Transformer of timm: attention in windows, with a table of relative positions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import describe_windows, require_index
from flashbias_convert.windows import WindowAttention


class SwinWindowAttention(WindowAttention):
    """timm's `WindowAttention`; the projections are the original's, line by line."""

    bypassed = ("attn_drop", "softmax")
    head_counts = ("num_heads",)
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"qkv": 3})

    window_size: tuple[int, int]
    num_heads: int
    scale: float
    relative_position_bias_table: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.relative_position_bias_table, tuple(self.window_size))

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        x = attend_windows(self.score_bias, q, k, v, mask, scale=self.scale)
        x = x.transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))


def describe(site: Site) -> Description:
    """The position bias by the module's own look-up, and the shift mask that its block keeps."""
    from timm.models.swin_transformer import get_relative_position_index

    module: Any = site.module
    index = module.relative_position_index
    require_index(index, get_relative_position_index(*module.window_size))
    dim = module.qkv.out_features // 3
    return describe_windows(site, module._get_rel_pos_bias()[0], index, dim)


recipe = Recipe(
    name="timm_swin",
    title="Swin Transformer (timm)",
    classes=("timm.models.swin_transformer.WindowAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=SwinWindowAttention,
    describe=describe,
    about=About(
        models="Swin Transformer, any window and image size",
        exact="shift mask; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49 to 196",
    ),
)

"""Swin Transformer V2 CR of timm: cosine attention, and an MLP of logarithmic offsets."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import (
    cosine_scale,
    describe_windows,
    in_float32,
    require_own_buffers,
    require_plain_layers,
    rounding_warnings,
)
from flashbias_convert.windows import WindowAttention


class SwinV2CrAttention(WindowAttention):
    """timm's `WindowMultiHeadAttention`; the bias is not bounded by a sigmoid."""

    # the hidden layer of the MLP has dropout of its own
    bypassed = ("meta_mlp", "attn_drop")

    window_size: tuple[int, int]
    num_heads: int
    logit_scale: nn.Parameter
    meta_mlp: nn.Module
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # the coordinates follow from the window
        return (*self.meta_mlp.parameters(), self.logit_scale, tuple(self.window_size))

    def scale_bound(self) -> float | None:
        scale = cosine_scale(self.logit_scale).detach()
        return None if scale.is_meta else float(scale.max())

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        qkv = self.qkv(x).view(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        scale = self.sealed("scale", self.logit_scale, cosine_scale)
        x = attend_windows(self.score_bias, q, k, v, mask, scale=scale, cosine=True)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


def describe(site: Site) -> Description:
    """The bias by the module's own MLP, and the shift mask that its block keeps."""
    from timm.models.swin_transformer import get_relative_position_index

    module: Any = site.module
    require_plain_layers(module.meta_mlp, module)
    require_own_buffers(module)
    own = module._relative_positional_encodings()[0]
    bias = in_float32(module)._relative_positional_encodings()[0]
    index = get_relative_position_index(*module.window_size).to(bias.device)
    warnings = rounding_warnings(own, bias)
    return describe_windows(site, bias, index, module.in_features, warnings, cosine=True)


recipe = Recipe(
    name="timm_swinv2_cr",
    title="Swin Transformer V2 CR (timm)",
    classes=("timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=SwinV2CrAttention,
    describe=describe,
    about=About(
        models="Swin Transformer V2 CR, any window and image size",
        exact="shift mask, cosine attention; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49",
    ),
)

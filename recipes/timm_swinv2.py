"""Swin Transformer V2 of timm: cosine attention in windows, with a continuous position bias."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import (
    continuous_bias,
    cosine_scale,
    describe_windows,
    require_coordinates,
    require_index,
    require_plain_layers,
)
from flashbias_convert.windows import WindowAttention


class SwinV2WindowAttention(WindowAttention):
    """timm's `WindowAttention`; the projections are the original's, line by line."""

    bypassed = ("cpb_mlp", "attn_drop", "softmax")
    head_counts = ("num_heads",)
    head_values: ClassVar[tuple[str, ...]] = ("logit_scale", "q_bias", "k_bias", "v_bias")
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"qkv": 3})

    window_size: tuple[int, int]
    pretrained_window_size: tuple[int, int]
    num_heads: int
    qkv_bias_separate: bool
    qkv: nn.Linear
    q_bias: nn.Parameter | None
    k_bias: Tensor
    v_bias: nn.Parameter
    logit_scale: nn.Parameter
    cpb_mlp: nn.Sequential
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # the coordinates and the index follow from the two window sizes
        sizes = (tuple(self.window_size), tuple(self.pretrained_window_size))
        return (*self.cpb_mlp.parameters(), self.logit_scale, *sizes)

    def used_sources(self) -> tuple[Tensor, ...]:
        return (self.logit_scale,)

    def scale_bound(self) -> float | None:
        scale = cosine_scale(self.logit_scale).detach()
        return None if scale.is_meta else float(scale.max())

    def _project_qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values of tokens, (B * nW, N, 3 C)."""
        if self.q_bias is None:
            return self.qkv(x)
        qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if self.qkv_bias_separate:
            qkv = self.qkv(x)
            qkv += qkv_bias
            return qkv
        return F.linear(x, weight=self.qkv.weight, bias=qkv_bias)

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        qkv = self._project_qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        scale = self.sealed("scale", self.logit_scale, cosine_scale)
        x = attend_windows(self.score_bias, q, k, v, mask, scale=scale, cosine=True)
        x = x.transpose(1, 2).flatten(2)  # not `channels`: heads may be split over processes
        return self.proj_drop(self.proj(x))


def describe(site: Site) -> Description:
    """The position bias from the module's own layers, and the shift mask that its block keeps."""
    module: Any = site.module
    require_plain_layers(module.cpb_mlp, module)
    _check_buffers(module)
    index = module.relative_position_index
    bias, warnings = continuous_bias(
        module.cpb_mlp, module.relative_coords_table, index, module.num_heads
    )
    return describe_windows(site, bias, index, module.dim, warnings, cosine=True)


def _check_buffers(module: Any) -> None:
    table, index = module.relative_coords_table, module.relative_position_index
    right_table, right_index = module._make_pair_wise_relative_positions(
        device=index.device, dtype=torch.float32
    )
    require_index(index, right_index)
    require_coordinates(table, right_table)


recipe = Recipe(
    name="timm_swinv2",
    title="Swin Transformer V2 (timm)",
    classes=("timm.models.swin_transformer_v2.WindowAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=SwinV2WindowAttention,
    describe=describe,
    about=About(
        models="Swin Transformer V2, any window and image size; Microsoft's `.pth` files",
        exact=(
            "shift mask, cosine attention, logit scales; with `--method exact` the position "
            "bias, too"
        ),
        truncated="position bias",
        n="window: 64 to 576",
    ),
)

"""EfficientViT (MSRA) of timm: heads that wait for each other, each with a call of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.maps import with_channels_last
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import absolute_offsets, require_index


class CascadedGroupAttention(PatchedAttention):
    """timm's class of that name; its cache of biases is not used."""

    head_by_head = True

    scale: float
    key_dim: int
    val_dim: int
    resolution: int
    attention_biases: nn.Parameter
    qkvs: nn.ModuleList
    dws: nn.ModuleList
    proj: nn.Sequential

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, self.resolution)

    def flashbias_forward(self, x: Tensor) -> Tensor:
        """Maps of windows (B, C, H, W); a head adds the output of the one before to its input."""
        inputs = with_channels_last(x).chunk(len(self.qkvs), dim=1)
        found: list[Tensor] = []
        for head, (qkv, dws) in enumerate(zip(self.qkvs, self.dws, strict=True)):
            made = qkv(inputs[head] + found[-1] if found else inputs[head])
            q, k, v = made.split([self.key_dim, self.key_dim, self.val_dim], dim=1)
            q, k, v = (part.flatten(2).mT[:, None] for part in (dws(q), k, v))  # (B, 1, N, D)
            out = self.score_bias(q, k, v, scale=self.scale, heads=(head,))
            found.append(out[:, 0].mT.unflatten(-1, x.shape[2:]))
        projected: Tensor = self.proj(torch.cat(found, 1))
        return projected


def describe(site: Site) -> Description:
    """The bias looked up as the module does; its index is made from absolute offsets."""
    module: Any = site.module
    index, size = module.attention_bias_idxs, module.resolution
    require_index(index, absolute_offsets(size, size))
    return Description(
        bias=module.attention_biases[:, index],
        num_heads=module.num_heads,
        n=len(index),
        m=len(index),
        head_dim=module.key_dim,
        index=index,
        shared=True,  # windows of a map, none of which has a mask
    )


recipe = Recipe(
    name="timm_efficientvit",
    title="EfficientViT, MSRA (timm)",
    classes=("timm.models.efficientvit_msra.CascadedGroupAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=CascadedGroupAttention,
    describe=describe,
    about=About(
        models="EfficientViT of MSRA, whose heads are called one after the other",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 16, 49",
    ),
)

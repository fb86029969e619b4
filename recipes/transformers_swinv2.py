"""Swin Transformer V2 of transformers, and its copy in Swin2SR: the mask is added twice."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.fallback import say_original
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.tables import (
    continuous_bias,
    cosine_scale,
    require_coordinates,
    require_index,
    require_plain_layers,
)
from flashbias_convert.windows import ShiftedLayer, is_shifted, layer_mask

#: how often the original adds its mask
TIMES = 2


class Swinv2SelfAttention(PatchedAttention):
    """`Swinv2SelfAttention`; the projections are the original's."""

    bypassed = ("continuous_position_bias_mlp", "dropout")
    head_counts = ("num_attention_heads",)
    head_values = ("logit_scale",)

    window_size: tuple[int, int]
    pretrained_window_size: tuple[int, int]
    attention_head_size: int
    logit_scale: nn.Parameter
    continuous_position_bias_mlp: nn.Sequential
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # the coordinates and the index follow from the two window sizes
        sizes = (tuple(self.window_size), tuple(self.pretrained_window_size))
        return (*self.continuous_position_bias_mlp.parameters(), self.logit_scale, *sizes)

    def used_sources(self) -> tuple[Tensor, ...]:
        return (self.logit_scale,)

    def scale_bound(self) -> float | None:
        scale = cosine_scale(self.logit_scale).detach()
        return None if scale.is_meta else float(scale.max())

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, ...]:
        if output_attentions:
            say_original("attention weights")
            given = (hidden_states, attention_mask, output_attentions)
            original: tuple[Tensor, ...] = self.original_forward(*given)
            return original
        shape = (*hidden_states.shape[:2], -1, self.attention_head_size)  # (B * nW, N, H, D)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scale = self.sealed("scale", self.logit_scale, cosine_scale)
        out = attend_windows(
            self.score_bias, q, k, v, attention_mask, times=TIMES, scale=scale, cosine=True
        )
        return (out.transpose(1, 2).flatten(2),)


def describe(site: Site) -> Description:
    """The position bias from the module's own layers, and the shift mask of its layer, twice."""
    module: Any = site.module
    require_plain_layers(module.continuous_position_bias_mlp, module)
    table, index = module.relative_coords_table, module.relative_position_index
    right_table, right_index = module.create_coords_table_and_index()
    require_index(index, right_index)
    require_coordinates(table, right_table)
    heads = module.num_attention_heads
    bias, warnings = continuous_bias(module.continuous_position_bias_mlp, table, index, heads)
    # the layer holds an attention that holds this module
    name = site.name.rpartition(".")[0].rpartition(".")[0]
    mask = layer_mask(site.root.get_submodule(name), bias)
    masks, mask_warnings = planned_mask(None if mask is None else TIMES * mask)
    n = math.prod(module.window_size)
    return Description(
        bias=bias,
        num_heads=heads,
        n=n,
        m=n,
        head_dim=module.attention_head_size,
        index=index,
        exact_terms=masks,
        warnings=warnings + mask_warnings,
    )


_PREFIXES = (
    "transformers.models.swinv2.modeling_swinv2.Swinv2",
    "transformers.models.swin2sr.modeling_swin2sr.Swin2SR",
)
_LAYERS = tuple(f"{prefix}Layer" for prefix in _PREFIXES)

recipe = Recipe(
    name="transformers_swinv2",
    title="Swin Transformer V2, Swin2SR (transformers)",
    classes=tuple(f"{prefix}SelfAttention" for prefix in _PREFIXES),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=Swinv2SelfAttention,
    describe=describe,
    owners=(Owner(_LAYERS, ShiftedLayer, when=is_shifted, required=False),),
    about=About(
        models="Swin Transformer V2 and Swin2SR, which add the shift mask twice",
        exact="shift mask, cosine attention; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 64 to 576",
    ),
)

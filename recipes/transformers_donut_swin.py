"""The older Swin of transformers, of which Donut, MaskFormer and CLAP have copies."""

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
from flashbias_convert.windows import ShiftedLayer, is_shifted, layer_mask


class SwinSelfAttention(PatchedAttention):
    """`DonutSwinSelfAttention` and its copies; the projections are the original's."""

    bypassed = ("dropout",)

    window_size: tuple[int, int]
    attention_head_size: int
    relative_position_bias_table: nn.Parameter
    relative_position_index: Tensor
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        table, index = self.relative_position_bias_table, self.relative_position_index
        return (table, index, tuple(self.window_size))

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
        scale = 1 / math.sqrt(self.attention_head_size)
        out = attend_windows(self.score_bias, q, k, v, attention_mask, scale=scale)
        return (out.transpose(1, 2).flatten(2),)


def describe(site: Site) -> Description:
    """The position bias looked up as the module does, and the shift mask of its layer."""
    module: Any = site.module
    n = math.prod(module.window_size)
    index = module.relative_position_index.view(n, n)
    bias = module.relative_position_bias_table[index].permute(2, 0, 1)
    # the layer holds an attention that holds this module
    name = site.name.rpartition(".")[0].rpartition(".")[0]
    masks, warnings = planned_mask(layer_mask(site.root.get_submodule(name), bias))
    return Description(
        bias=bias,
        num_heads=module.num_attention_heads,
        n=n,
        m=n,
        head_dim=module.attention_head_size,
        index=index,
        exact_terms=masks,
        warnings=warnings,
    )


_PLACES = {
    "donut.modeling_donut_swin": "DonutSwin",
    "maskformer.modeling_maskformer_swin": "MaskFormerSwin",
    "clap.modeling_clap": "ClapAudio",
}


def _classes(ending: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{m}.{prefix}{ending}" for m, prefix in _PLACES.items())


recipe = Recipe(
    name="transformers_donut_swin",
    title="Swin of Donut, MaskFormer and CLAP (transformers)",
    classes=_classes("SelfAttention"),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=SwinSelfAttention,
    describe=describe,
    owners=(Owner(_classes("Layer"), ShiftedLayer, when=is_shifted, required=False),),
    about=About(
        models="Swin in Donut, MaskFormer and CLAP",
        exact="shift mask; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49 to 144",
    ),
)

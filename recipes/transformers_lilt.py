"""LiLT of transformers: scores of the layout are added to those of the text, exactly of low rank.

Both streams use the same sum of scores, so one call attends for both, with their values side by
side.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal import attend_padded, is_key_table
from flashbias_convert.causal_owner import KeyTableOwner
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Owner, Recipe, Site


class LiltSelfAttention(PatchedAttention):
    """`LiltSelfAttention`; queries and keys of the layout become factors."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    channel_shrink_ratio: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    layout_query: nn.Linear
    layout_key: nn.Linear
    layout_value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the factors are made anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        layout_inputs: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, ...]:
        if attention_mask is None or not is_key_table(attention_mask):
            given = (hidden_states, layout_inputs, attention_mask, output_attentions)
            original: tuple[Tensor, ...] = self.original_forward(*given)
            return original
        text = (project(hidden_states) for project in (self.query, self.key, self.value))
        layout_projections = (self.layout_query, self.layout_key, self.layout_value)
        layout = (project(layout_inputs) for project in layout_projections)
        q, k, v = (self._heads(x) for x in text)
        layout_q, layout_k, layout_v = (self._heads(x) for x in layout)
        size = self.attention_head_size // self.channel_shrink_ratio
        inputs = {"q": layout_q, "k": layout_k, "scale": 1 / math.sqrt(size)}
        both = torch.cat([v, layout_v], -1)
        out = attend_padded(self.score_bias, q, k, both, attention_mask, built={"product": inputs})
        parts = out.transpose(1, 2).split([v.shape[-1], layout_v.shape[-1]], -1)
        return tuple(part.flatten(2) for part in parts)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)  # (B, H, N, D)


def describe(site: Site) -> Description:
    """Factors made in each call: their rank is the head size of the layout stream."""
    module: Any = site.module
    n = int(site.tokens or 512)
    heads, size = module.num_attention_heads, module.attention_head_size
    return Description(None, heads, n, n, size, builders=("product",))


_MODULE = "transformers.models.lilt.modeling_lilt"

recipe = Recipe(
    name="transformers_lilt",
    title="LiLT (transformers)",
    classes=(f"{_MODULE}.LiltSelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=LiltSelfAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.LiltModel",), KeyTableOwner),),
    about=About(
        models="LiLT",
        exact="the scores of its layout: factors of each call",
        n="up to 512",
    ),
)

"""Swin Transformer of transformers: its layers make the shift mask anew in every call."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.fallback import say_original, wants_weights
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.tables import require_index
from flashbias_convert.windows import ShiftedLayer, is_shifted, layer_mask


class SwinAttention(PatchedAttention):
    """`SwinAttention`; the projections are the original's."""

    bypassed = ("relative_position_bias",)
    head_counts = ("num_attention_heads",)

    config: Any
    head_dim: int
    scaling: float
    relative_position_bias: nn.Module
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        source: Any = self.relative_position_bias
        return (source.relative_position_bias_table, tuple(source.window_size))

    def flashbias_forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if wants_weights(self.config, kwargs):
            say_original("attention weights")
            given = (hidden_states, attention_mask)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)  # (B * nW, N, H, D)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend_windows(self.score_bias, q, k, v, attention_mask, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def describe(site: Site) -> Description:
    """The position bias by the module's own look-up, and the shift mask of its layer."""
    module: Any = site.module
    source = module.relative_position_bias
    require_index(source.relative_position_index, source._create_relative_position_index())
    bias = source()[0]
    mask = layer_mask(site.parent, bias)
    masks, warnings = planned_mask(mask)
    n = math.prod(source.window_size)
    return Description(
        bias=bias,
        num_heads=module.num_attention_heads,
        n=n,
        m=n,
        head_dim=module.head_dim,
        index=source.relative_position_index.view(n, n),
        exact_terms=masks,
        warnings=warnings,
        shared=mask is None and getattr(site.parent, "shift_size", None) == 0,
    )


_MODULE = "transformers.models.swin.modeling_swin"

recipe = Recipe(
    name="transformers_swin",
    title="Swin Transformer (transformers)",
    classes=(f"{_MODULE}.SwinAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=SwinAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.SwinLayer",), ShiftedLayer, when=is_shifted, required=False),),
    about=About(
        models="Swin Transformer, alone and as a backbone",
        exact="shift mask; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49, 144",
    ),
)

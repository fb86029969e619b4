"""WavLM of transformers: one bias of the distance for all layers, gated by each query."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.fallback import WEIGHTS, say_original, weights_are_recorded
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.tables import require_shared_heads

#: keyword argument that the encoder hands through its layers: position_bias is a table
_FUSED = "flashbias_table"


class WavLMAttention(PatchedAttention):
    """`WavLMAttention`; the gate multiplies the rows of a table that layer 0 makes."""

    num_heads: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    gru_rel_pos_linear: nn.Linear
    gru_rel_pos_const: nn.Parameter
    rel_attn_embed: nn.Embedding

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # layer 0 makes the table anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if not kwargs.pop(_FUSED, False):
            given = (hidden_states, attention_mask, position_bias, index)
            original: tuple[Tensor, Tensor, Tensor] = self.original_forward(*given, **kwargs)
            return original
        n = hidden_states.shape[1]
        if position_bias is None:
            distance = torch.arange(1 - n, n, device=hidden_states.device)
            bucket = self._relative_positions_bucket(distance)  # type: ignore[operator]
            position_bias = self.rel_attn_embed(bucket).T  # (H, 2 N - 1)
        # the original takes the weights and does not call the layers: nor do their hooks run here
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._heads(F.linear(hidden_states, p.weight, p.bias)) for p in projections)
        gate = self._gate(self._heads(hidden_states))
        built = {"distance_table": {"table": position_bias, "n": n, "gate": gate}}
        seen = None if attention_mask is None else attention_mask == 1  # (B, N)
        out = self.score_bias(q, k, v, built=built, key_mask=seen, scale=self.scaling)
        last = self.out_proj
        out = F.linear(out.transpose(1, 2).flatten(2), last.weight, last.bias)
        return out, None, position_bias

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, D)

    def _gate(self, heads: Tensor) -> Tensor:
        """What multiplies the rows of the bias, (B, H, N)."""
        sums = self.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1)
        a, b = sums.sigmoid().unbind(-1)
        return a * (b * self.gru_rel_pos_const[..., 0] - 1.0) + 2.0


class WavLMEncoder(PatchedOwner):
    """The encoder, whose layers hand on what the first makes; it tells them what that is."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        if weights_are_recorded():
            say_original(WEIGHTS)
            return self.original_forward(*args, **kwargs)
        return self.original_forward(*args, **kwargs, **{_FUSED: True})


def describe(site: Site) -> Description:
    """A table for each call: 50 frames a second, so 500 stand for ten seconds."""
    module: Any = site.module
    owner: Any = site.owner
    n = site.tokens or 500
    heads, size = module.num_heads, module.head_dim
    below = (m for m in owner.modules() if isinstance(m, nn.Embedding))  # layer 0 has the only one
    require_shared_heads(heads, next(below, None))
    return Description(None, heads, n, n, size, builders=("distance_table",))


_MODULE = "transformers.models.wavlm.modeling_wavlm"
_ENCODERS = (f"{_MODULE}.WavLMEncoder", f"{_MODULE}.WavLMEncoderStableLayerNorm")

recipe = Recipe(
    name="transformers_wavlm",
    title="WavLM (transformers)",
    classes=(f"{_MODULE}.WavLMAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=WavLMAttention,
    describe=describe,
    owners=(Owner(_ENCODERS, WavLMEncoder),),
    about=About(
        models="WavLM",
        exact="its bias of the distance times the gate of each query",
        n="any: 50 a second",
    ),
)

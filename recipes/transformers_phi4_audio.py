"""Audio encoder of Phi-4-multimodal in transformers: one bias of the distance for all layers.

Its mask is boolean and is added to the bias like a number, so that keys that are not padding get
one more, and nothing is hidden. So it is here. Audio of more than 500 frames is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import require_shared_heads
from flashbias_convert.terms import KeyBias


class Phi4AudioAttention(PatchedAttention):
    """`Phi4MultimodalAudioAttention`; its mask is what `Phi4AudioModel` puts in one row."""

    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.head_dim,)  # the model makes the table anew in each call

    def flashbias_forward(
        self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> Tensor:
        n = hidden_states.shape[1]
        if tuple(attention_mask.shape[-2:]) != (1, 3 * n - 1):
            original: Tensor = self.original_forward(hidden_states, attention_mask, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in projections)
        keys = KeyBias(values=attention_mask[:, :1, 0, :n].float())  # (B or 1, 1, N)
        table = attention_mask[0, :, 0, n:]  # (H, 2 N - 1)
        built = {"distance_table": {"table": table, "n": n}}
        out = self.score_bias(q, k, v, built=built, extra=(keys,), scale=self.scaling)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class Phi4AudioModel(PatchedOwner):
    """`Phi4MultimodalAudioModel`, which adds a mask (B, N, N) to a bias (H, N, N).

    While lean both are rows of 3 N - 1 numbers, (B, 1, 1, 3 N - 1) and (1, H, 1, 3 N - 1): one for
    each key, zeros in the bias, and one for each distance, zeros in the mask.
    """

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    def _streaming_mask(self, seq_len: int, batch_size: int, *args: Any) -> Tensor:
        if not self.is_lean:
            dense: Tensor = super()._streaming_mask(seq_len, batch_size, *args)  # type: ignore[misc]
            return dense
        return torch.ones(batch_size, 1, seq_len, dtype=torch.bool)  # one chunk: see `describe`

    def forward_embeddings(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        states, mask, padding = super().forward_embeddings(*args)  # type: ignore[misc]
        return states, self._in_a_row(mask), padding

    def calculate_hs_mask(self, *args: Any) -> Tensor:
        return self._in_a_row(super().calculate_hs_mask(*args))  # type: ignore[misc]

    def _in_a_row(self, mask: Tensor) -> Tensor:
        return F.pad(mask, (0, 2 * mask.shape[-1] - 1)) if self.is_lean else mask

    @property
    def relative_attention_bias_layer(self) -> Any:
        """The module; while lean, what makes a table of distances instead of a matrix."""
        return self._table if self.is_lean else self._modules["relative_attention_bias_layer"]

    def _table(self, x: Tensor) -> Tensor:
        layer: Any = self._modules["relative_attention_bias_layer"]
        n = x.shape[1]
        distance = torch.arange(1 - n, n, device=x.device)
        distance = distance.clamp(-layer.max_distance, layer.max_distance - 1)
        entry = distance.abs() if layer.symmetric else distance + layer.num_buckets // 2
        return F.pad(layer.bias_values(entry).T, (n, 0))[None, :, None]


def describe(site: Site) -> Description:
    """A table for each call: 12.5 frames a second, so 500 stand for forty seconds."""
    module: Any = site.module
    config = module.config
    if config.chunk_size > 0:
        raise UnsupportedSite(
            f"it is configured for streaming in chunks of {config.chunk_size} frames"
        )
    owner: Any = site.owner
    n, size = min(site.tokens or 500, 500), module.head_dim
    heads = getattr(module.q_proj, "out_features", config.hidden_size) // size
    require_shared_heads(heads, owner.relative_attention_bias_layer.bias_values)
    return Description(None, heads, n, n, size, builders=("distance_table",))


_MODULE = "transformers.models.phi4_multimodal.modeling_phi4_multimodal"

recipe = Recipe(
    name="transformers_phi4_audio",
    title="Audio encoder of Phi-4-multimodal (transformers)",
    classes=(f"{_MODULE}.Phi4MultimodalAudioAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=Phi4AudioAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.Phi4MultimodalAudioModel",), Phi4AudioModel),),
    about=About(
        models="Phi-4-multimodal's audio encoder, whose mask hides nothing, but adds one",
        exact="its bias of the distance: a table of 2 N - 1 numbers a head, made once a call",
        n="up to 500",
    ),
)

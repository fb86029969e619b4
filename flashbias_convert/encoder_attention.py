"""Attention as BERT has it, in transformers, with a bias that its encoder makes and hands down."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from .patched_attention import PatchedAttention

#: keyword argument that a patched owner hands through its layers: the mask is one of padding
PADDING = "flashbias_padding"


class EncoderAttention(PatchedAttention):
    """Base of patched self-attention that is called with a mask and with ``position_bias``.

    The bias, (B, H, N, N), becomes a dense term of the call: the builder "dense". Without a bias,
    or where no patched owner has said that the mask is one of padding, the original runs.
    """

    bypassed: ClassVar[tuple[str, ...]] = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    scaling: float
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the encoder makes the bias anew in each call

    def seen_keys(self, attention_mask: Tensor | None, padding: Any, keys: int) -> Tensor | None:
        """Which keys are seen, (B, M); None for all of them.

        Args:
            attention_mask: as the attention is called with it.
            padding: what the owner hands through its layers as `PADDING`.
            keys: how many there are, M.
        """
        raise NotImplementedError

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        told, padding = PADDING in kwargs, kwargs.pop(PADDING, None)
        if position_bias is None or not told:
            given = (hidden_states, attention_mask, position_bias)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        heads = (project(hidden_states).view(shape) for project in projections)
        q, k, v = (x.transpose(1, 2) for x in heads)
        seen = self.seen_keys(attention_mask, padding, k.shape[-2])
        built = {"dense": {"bias": position_bias}}
        out = self.score_bias(q, k, v, built=built, key_mask=seen, scale=self.scaling)
        return out.transpose(1, 2).flatten(2), None

"""Attention as BERT has it, in transformers, with a bias that its encoder makes and hands down."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .causal import is_key_table
from .patched_attention import PatchedAttention
from .patched_owner import PatchedOwner


class EncoderAttention(PatchedAttention):
    """Base of patched self-attention that is called with a mask and with biases, by their names.

    The bias, (B, H, N, N), becomes a dense term of the call: the builder "dense". Where no
    `EncoderOwner` has said that the mask is one of padding, the original runs.
    """

    bypassed: ClassVar[tuple[str, ...]] = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the encoder makes the bias anew in each call

    def bias_of_call(self, given: Mapping[str, Any], scale: float) -> Tensor:
        """What is added to the scores, (B, H, N, N).

        Args:
            given: the keyword arguments of the call.
            scale: of the scores.
        """
        bias: Tensor = given["position_bias"]
        return bias

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None or not is_key_table(attention_mask):
            given = (hidden_states, attention_mask, *args)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        heads = (project(hidden_states).view(shape) for project in projections)
        q, k, v = (x.transpose(1, 2) for x in heads)
        scale = self.attention_head_size**-0.5
        built = {"dense": {"bias": self.bias_of_call(kwargs, scale)}}
        seen = attention_mask[:, 0, 0] != 0 if attention_mask.shape[-1] else None
        out = self.score_bias(q, k, v, built=built, key_mask=seen, scale=scale)
        return out.transpose(1, 2).flatten(2), None


class EncoderOwner(PatchedOwner):
    """Base of models that make a mask of padding and call their child ``encoder`` with it.

    Inside `lean`, the attention gets a key table instead, in which a key that is seen has some
    place, and knows by it that nothing but padding is hidden.
    """

    @property
    def encoder(self) -> Any:
        """What the model calls with its mask."""
        encoder: Any = self._modules["encoder"]
        return partial(_with_key_table, encoder) if self.is_lean else encoder


def _with_key_table(
    encoder: Any, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    if attention_mask is None:
        keys = torch.zeros(1, 1, 1, 0, dtype=torch.int32, device=hidden_states.device)
    else:
        keys = _seen(attention_mask, hidden_states)[:, None, None].int()
    return encoder(hidden_states, *args, attention_mask=keys, **kwargs)


def _seen(mask: Any, states: Tensor) -> Tensor:
    """Which keys are seen, (B, M), from whatever mask transformers makes: all rows are the same."""
    if not isinstance(mask, Tensor):  # that of flex attention, a function of indices
        sample, key = (torch.arange(size, device=states.device) for size in states.shape[:2])
        none = torch.zeros_like(sample[:, None])
        seen: Tensor = mask.mask_mod(sample[:, None], none, none, key)
        return seen
    row = mask if mask.dim() == 2 else mask[:, 0, 0]
    added = mask.dim() == 4 and mask.is_floating_point()
    return row == 0 if added else row != 0

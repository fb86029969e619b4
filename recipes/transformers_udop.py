"""UDOP of transformers: a decoder like T5's, and an encoder whose bias follows the boxes of a page.

The stack makes the encoder's bias once for each batch, as a matrix for each head. It stays a dense
term; the original merges it with the mask into another matrix of its size in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.causal import cache_of_call
from flashbias_convert.causal_owner import KeyTableOwner, PaddingMaskInGenerate
from flashbias_convert.fallback import WEIGHTS, say_original, weights_are_recorded
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.terms import Dense

from .transformers_t5 import T5Attention, is_self_attention
from .transformers_t5 import describe as describe_t5


class UdopAttention(T5Attention):
    """`UdopAttention` as self-attention."""

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        cache = cache_of_call(cache, kwargs)
        given = (hidden_states, mask, key_value_states, position_bias, cache)
        if self.is_decoder:
            return super().flashbias_forward(*given, **kwargs)
        if position_bias is None or weights_are_recorded():
            if position_bias is not None:
                say_original(WEIGHTS)
            original: tuple[Tensor, ...] = self.original_forward(*given, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.key_value_proj_dim)
        heads = (project(hidden_states).view(shape) for project in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        extra = () if mask is None else (Dense(bias=_additive(mask, q.dtype)),)
        built = {"dense": {"bias": position_bias}}
        out = self.score_bias(q, k, v, built=built, extra=extra, scale=1.0)
        done = self.o(out.transpose(1, 2).flatten(2))
        return done, position_bias, None  # type: ignore[return-value]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: boolean ones say what is seen."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def describe(site: Site) -> Description:
    """A decoder's table of distances, or a dense term that an encoder is handed in each call."""
    made = describe_t5(site)
    module: Any = site.module
    if module.is_decoder:
        return made
    return Description(None, made.num_heads, made.n, made.m, made.head_dim, builders=("dense",))


_PREFIX = "transformers.models.udop.modeling_udop.Udop"

recipe = Recipe(
    name="transformers_udop",
    title="UDOP (transformers)",
    classes=(f"{_PREFIX}Attention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=UdopAttention,
    describe=describe,
    owners=(
        Owner(
            (f"{_PREFIX}Stack",),
            KeyTableOwner,
            when=lambda stack: bool(stack.is_decoder),
            required=False,
        ),
        Owner((f"{_PREFIX}ForConditionalGeneration",), PaddingMaskInGenerate),
    ),
    shares=is_self_attention,
    about=About(
        models="UDOP: its decoder as T5's; its encoder with the boxes of a page",
        exact="a table of 2 N - 1 numbers a head; in the encoder a dense term, made once a batch",
    ),
)

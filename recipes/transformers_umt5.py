"""UMT5 of transformers: T5 whose every layer has a bias of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.causal import cache_of_call, is_key_table
from flashbias_convert.causal_owner import KeyTableOwner, PaddingMaskInGenerate
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite

from .transformers_t5 import T5Attention, is_self_attention
from .transformers_t5 import describe as describe_t5


class UMT5Attention(T5Attention):
    """`UMT5Attention` as self-attention."""

    def flashbias_forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = cache_of_call(cache, kwargs)
        if attention_mask is None or not is_key_table(attention_mask):
            given = (hidden_states, encoder_hidden_states, cache, attention_mask)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        return self.attend(hidden_states, attention_mask, None, cache)[0], None


def describe(site: Site) -> Description:
    """As T5's, unless its decoder is one of those that were not told that they are causal."""
    module: Any = site.module
    if is_untold(module):
        raise UnsupportedSite(
            "this version of transformers does not tell it that it is causal: where nothing is "
            "padded it attends to later tokens with sdpa, and not with eager; newer ones do tell"
        )
    return describe_t5(site)


def is_untold(module: Any) -> bool:
    """Whether it is a decoder's self-attention, which alone has a table, and does not know it."""
    return bool(module.is_decoder and module.has_relative_attention_bias and not module.is_causal)


_MODULE = "transformers.models.umt5.modeling_umt5"

recipe = Recipe(
    name="transformers_umt5",
    title="UMT5 (transformers)",
    classes=(f"{_MODULE}.UMT5Attention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=UMT5Attention,
    describe=describe,
    owners=(
        Owner((f"{_MODULE}.UMT5Stack",), KeyTableOwner),
        Owner((f"{_MODULE}.UMT5ForConditionalGeneration",), PaddingMaskInGenerate),
    ),
    shares=is_self_attention,
    about=About(
        models="UMT5, as T5; its decoder from transformers 5.18 on",
        exact="its bias of the distance, which each layer makes once a call",
    ),
)

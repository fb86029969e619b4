"""LayoutLMv3 of transformers: one bias for all layers, of places in the text and on the page.

It depends on the boxes of each sample, through three tables at once, and stays a dense term. The
model makes it once for each batch; the original then merges it with the mask in every layer, into
a matrix of its size, and the kernel does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.encoder_attention import EncoderAttention, EncoderOwner
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original, wants_weights
from flashbias_convert.kept import kept_with, kept_with_both
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site


class LayoutLMv3SelfAttention(EncoderAttention):
    """`LayoutLMv3SelfAttention`; the projections are the original's."""

    def bias_of_call(self, given: Mapping[str, Any], scale: float) -> Tensor:
        if "position_bias" in given:
            return super().bias_of_call(given, scale)
        # older versions add up and scale in each layer
        of_text, of_page = given["rel_pos"], given["rel_2d_pos"]
        made: Tensor
        if of_page is None:
            made = kept_with(of_text, "scaled", lambda: of_text * scale)
        else:
            made = kept_with_both(of_text, of_page, "scaled", lambda: (of_text + of_page) * scale)
        return made


class LayoutLMv3Model(EncoderOwner):
    """`LayoutLMv3Model`, which makes a mask of padding of the text; its patches are all seen."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        mask, recorded = call.get("attention_mask"), wants_weights(self.config, call)
        if recorded or (mask is not None and mask.dim() != 2):
            say_original(WEIGHTS if recorded else NO_PADDING_MASK)
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(**call)


def describe(site: Site) -> Description:
    """A dense term that the encoder hands over in each call."""
    module, owner = cast(Any, site.module), cast(Any, site.owner)
    config = owner.config
    if not config.has_relative_attention_bias:
        raise NoBias("it is configured without a relative bias")
    patches = (config.input_size // config.patch_size) ** 2 + 1 if config.visual_embed else 0
    n = site.tokens or 512 + patches
    heads, size = module.num_attention_heads, module.attention_head_size
    return Description(None, heads, n, n, size, builders=("dense",))


_MODULE = "transformers.models.layoutlmv3.modeling_layoutlmv3"

recipe = Recipe(
    name="transformers_layoutlmv3",
    title="LayoutLMv3 (transformers)",
    classes=(f"{_MODULE}.LayoutLMv3SelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=LayoutLMv3SelfAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.LayoutLMv3Model",), LayoutLMv3Model),),
    about=About(
        models="LayoutLMv3, with and without an image",
        exact="a dense term that the model makes once a batch",
        n="up to 709",
    ),
)

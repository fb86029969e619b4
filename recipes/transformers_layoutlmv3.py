"""LayoutLMv3 of transformers: one bias for all layers, of places in the text and on the page.

It depends on the boxes of each sample, through three tables at once, and stays a dense term. The
model makes it once for each batch; the original then merges it with the mask in every layer, into
a matrix of its size, and the kernel does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.encoder_attention import PADDING, EncoderAttention
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original, wants_weights
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site


class LayoutLMv3SelfAttention(EncoderAttention):
    """`LayoutLMv3SelfAttention`; the projections are the original's."""

    def seen_keys(self, attention_mask: Tensor | None, padding: Any, keys: int) -> Tensor | None:
        if padding is None:
            return None
        patches = keys - padding.shape[-1]  # they follow the text, and none is hidden
        return F.pad(padding != 0, (0, patches), value=True)


class LayoutLMv3Model(PatchedOwner):
    """`LayoutLMv3Model`, which hands its padding mask, of the text, to the attention, too."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        mask, recorded = call.get("attention_mask"), wants_weights(self.config, call)
        if recorded or (mask is not None and mask.dim() != 2):
            say_original(WEIGHTS if recorded else NO_PADDING_MASK)
            return self.original_forward(*args, **kwargs)
        return self.original_forward(**call, **{PADDING: mask})


def describe(site: Site) -> Description:
    """A dense term that the encoder hands over in each call."""
    module: Any = site.module
    config = module.config
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
    tested=">=5.24,<5.25",
    attention=LayoutLMv3SelfAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.LayoutLMv3Model",), LayoutLMv3Model),),
    about=About(
        models="LayoutLMv3, with and without an image",
        exact="a dense term that the model makes once a batch",
        n="up to 709",
    ),
)

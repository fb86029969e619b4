"""LayoutLMv3 of transformers: one bias for all layers, of places in the text and on the page.

It depends on the boxes of each sample, through three tables at once, and stays a dense term. The
model makes it once for each batch; the original then merges it with the mask in every layer, into
a matrix of its size, and the kernel does not.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original, wants_weights
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site

#: keyword argument that the model hands through its layers: the padding mask of the text, or None
_PADDING = "flashbias_padding"


class LayoutLMv3SelfAttention(PatchedAttention):
    """`LayoutLMv3SelfAttention`; the projections are the original's."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    scaling: float
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the encoder makes the bias anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if _PADDING not in kwargs:
            given = (hidden_states, attention_mask, position_bias)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        heads = (project(hidden_states).view(shape) for project in projections)
        q, k, v = (x.transpose(1, 2) for x in heads)
        built = {"dense": {"bias": position_bias}}
        padding = kwargs[_PADDING]  # of the text; patches follow it, and none is hidden
        hidden = 0 if padding is None else k.shape[-2] - padding.shape[-1]
        seen = None if padding is None else F.pad(padding != 0, (0, hidden), value=True)
        out = self.score_bias(q, k, v, built=built, key_mask=seen, scale=self.scaling)
        return out.transpose(1, 2).flatten(2), None


class LayoutLMv3Model(PatchedOwner):
    """`LayoutLMv3Model`, which hands its padding mask to the attention beside the usual one."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        mask, recorded = call.get("attention_mask"), wants_weights(self.config, call)
        if recorded or (mask is not None and mask.dim() != 2):
            say_original(WEIGHTS if recorded else NO_PADDING_MASK)
            return self.original_forward(*args, **kwargs)
        return self.original_forward(**call, **{_PADDING: mask})


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

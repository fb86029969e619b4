"""LayoutLMv2 of transformers: two biases for all layers, of places in the text and on the page.

They depend on the boxes of each sample, and stay dense terms. The encoder makes both once a batch;
the original adds both to the scores in every layer, and here the first layer adds them up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.fallback import (
    NO_PADDING_MASK,
    WEIGHTS,
    say_original,
    weights_are_recorded,
)
from flashbias_convert.kept import kept_with_both
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site


class LayoutLMv2SelfAttention(PatchedAttention):
    """`LayoutLMv2SelfAttention`; the projections are the original's."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the encoder makes the bias anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        rel_2d_pos: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        padding = attention_mask is not None and is_padding(attention_mask)
        if not padding or weights_are_recorded():
            say_original(WEIGHTS if padding else NO_PADDING_MASK)
            given = (hidden_states, attention_mask, rel_pos, rel_2d_pos)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        assert attention_mask is not None
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        heads = self.compute_qkv(hidden_states)  # type: ignore[operator]
        q, k, v = (x.view(shape).transpose(1, 2) for x in heads)
        out = self.score_bias(
            q, k, v,
            built={"dense": {"bias": self.total(rel_pos, rel_2d_pos)}},
            key_mask=attention_mask[:, 0, 0] == 0,
            scale=self.attention_head_size**-0.5,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2), None

    def total(self, rel_pos: Tensor | None, rel_2d_pos: Tensor | None) -> Tensor:
        """What this layer adds, (B, H, N, N); layers that are handed the same find it made."""
        of_text = rel_pos if self.has_relative_attention_bias else None
        of_page = rel_2d_pos if self.has_spatial_attention_bias else None
        if of_text is None or of_page is None:
            one = of_page if of_text is None else of_text
            assert one is not None
            return one
        made: Tensor = kept_with_both(of_text, of_page, "total", lambda: of_text + of_page)
        return made


def is_padding(mask: Tensor) -> bool:
    """Whether a mask, not zero where a key is hidden, is the same for all queries and heads."""
    return mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def describe(site: Site) -> Description:
    """A dense term, made of what the encoder hands over in each call."""
    module: Any = site.module
    if not (module.has_relative_attention_bias or module.has_spatial_attention_bias):
        raise NoBias("it is configured without a relative bias")
    n = site.tokens or 512 + 49  # text, and an image of 7 x 7 patches
    heads, size = module.num_attention_heads, module.attention_head_size
    return Description(None, heads, n, n, size, builders=("dense",))


recipe = Recipe(
    name="transformers_layoutlmv2",
    title="LayoutLMv2 (transformers)",
    classes=("transformers.models.layoutlmv2.modeling_layoutlmv2.LayoutLMv2SelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=LayoutLMv2SelfAttention,
    describe=describe,
    about=About(
        models="LayoutLMv2 and LayoutXLM",
        exact="a dense term, the sum of both biases, made once a batch",
        n="up to 561",
    ),
)

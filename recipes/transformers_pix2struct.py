"""Pix2Struct of transformers: its text decoder is T5's, under other names."""

from __future__ import annotations

from typing import Any

from torch import nn

from flashbias_convert.about import About
from flashbias_convert.causal_owner import KeyTableOwner, PaddingMaskInGenerate
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import require_shared_heads

from .transformers_t5 import T5Attention, table_below


class Pix2StructAttention(T5Attention):
    """`Pix2StructTextAttention` as self-attention."""

    is_decoder = True
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value, self.output


def is_self_attention(module: Any) -> bool:
    """Cross-attention is not causal, and adds no bias."""
    return bool(module.is_causal)


def is_causal_model(model: Any) -> bool:
    """Whether it makes a causal mask, which a key table takes the place of."""
    return bool(model.config.is_decoder)


def makes_causal_masks(model: Any) -> bool:
    """A key table takes their place."""
    return bool(model.config.is_decoder)


def describe(site: Site) -> Description:
    """A table for each call: the bias depends on the distance alone."""
    module: Any = site.module
    if not module.config.is_decoder:
        raise UnsupportedSite("it is configured to attend in both directions")
    if not is_self_attention(module):
        raise NoBias("cross-attention: it adds no bias")
    n, size = site.tokens or 512, module.key_value_proj_dim
    heads = getattr(module.query, "out_features", module.n_heads * size) // size
    require_shared_heads(heads, table_below(site.owner))
    return Description(None, heads, n, n, size, builders=("distance_table",))


_PREFIX = "transformers.models.pix2struct.modeling_pix2struct.Pix2Struct"

recipe = Recipe(
    name="transformers_pix2struct",
    title="Pix2Struct, text decoder (transformers)",
    classes=(f"{_PREFIX}TextAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=Pix2StructAttention,
    describe=describe,
    owners=(
        Owner((f"{_PREFIX}TextModel",), KeyTableOwner, when=makes_causal_masks),
        Owner((f"{_PREFIX}ForConditionalGeneration",), PaddingMaskInGenerate),
    ),
    shares=is_self_attention,
    about=About(
        models="Pix2Struct: its text decoder, as T5's",
        exact="its bias of the distance: a table of 2 N - 1 numbers a head, made once a call",
    ),
)

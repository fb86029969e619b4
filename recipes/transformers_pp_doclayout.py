"""PP-DocLayoutV2 of transformers: reading order, with a bias of the boxes for all layers.

The encoder makes the bias once a batch, and it stays a dense term; the original merges it with the
mask into another matrix of its size in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.encoder_attention import EncoderAttention, EncoderOwner
from flashbias_convert.fallback import WEIGHTS, say_original, weights_are_recorded
from flashbias_convert.kept import kept_with
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site


class ReadingOrderSelfAttention(EncoderAttention):
    """`PPDocLayoutV2ReadingOrderSelfAttention`; the projections are the original's."""

    def bias_of_call(self, given: Mapping[str, Any], scale: float) -> Tensor:
        if "position_bias" in given:
            return super().bias_of_call(given, scale)
        # older versions choose and scale in each layer; the bias of the page is not scaled
        of_page, of_text = given["rel_2d_pos"], given["rel_pos"]
        if of_page is not None:
            return of_page
        made: Tensor = kept_with(of_text, "scaled", lambda: of_text * scale)
        return made


class ReadingOrder(EncoderOwner):
    """`PPDocLayoutV2ReadingOrder`, which makes a mask of padding."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        if weights_are_recorded():
            say_original(WEIGHTS)
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(*args, **kwargs)


def describe(site: Site) -> Description:
    """A dense term that the encoder hands over in each call."""
    module, owner = cast(Any, site.module), cast(Any, site.owner)
    config = owner.config
    if not (config.has_relative_attention_bias or config.has_spatial_attention_bias):
        raise NoBias("it is configured without a relative bias")
    n = site.tokens or 302  # 300 boxes, a start and an end
    heads, size = module.num_attention_heads, module.attention_head_size
    return Description(None, heads, n, n, size, builders=("dense",))


_MODULE = "transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2"

recipe = Recipe(
    name="transformers_pp_doclayout",
    title="PP-DocLayoutV2, reading order (transformers)",
    classes=(f"{_MODULE}.PPDocLayoutV2ReadingOrderSelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=ReadingOrderSelfAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.PPDocLayoutV2ReadingOrder",), ReadingOrder),),
    about=About(
        models="PP-DocLayoutV2: the reading order of its boxes",
        exact="a dense term that the encoder makes once a batch",
        n="up to 302",
    ),
)

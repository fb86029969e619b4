"""PP-DocLayoutV2 of transformers: reading order, with a bias of the boxes for all layers.

The encoder makes the bias once a batch, and it stays a dense term; the original merges it with the
mask into another matrix of its size in every layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.encoder_attention import PADDING, EncoderAttention
from flashbias_convert.fallback import WEIGHTS, say_original, weights_are_recorded
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site


class ReadingOrderSelfAttention(EncoderAttention):
    """`PPDocLayoutV2ReadingOrderSelfAttention`; the projections are the original's."""

    def seen_keys(self, attention_mask: Tensor | None, padding: Any, keys: int) -> Tensor | None:
        # all rows of the mask are the same: True, or zero where it is added, is seen
        row = None if attention_mask is None else attention_mask[:, 0, 0]
        return row == 0 if row is not None and row.is_floating_point() else row


class ReadingOrder(PatchedOwner):
    """`PPDocLayoutV2ReadingOrder`, which makes a mask of padding and tells its layers so."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        if weights_are_recorded():
            say_original(WEIGHTS)
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def encoder(self) -> Any:
        """What the model calls with its mask."""
        encoder: Any = self._modules["encoder"]
        return partial(encoder, **{PADDING: True}) if self.is_lean else encoder


def describe(site: Site) -> Description:
    """A dense term that the encoder hands over in each call."""
    module: Any = site.module
    config = module.config
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
    tested=">=5.24,<5.25",
    attention=ReadingOrderSelfAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.PPDocLayoutV2ReadingOrder",), ReadingOrder),),
    about=About(
        models="PP-DocLayoutV2: the reading order of its boxes",
        exact="a dense term that the encoder makes once a batch",
        n="up to 302",
    ),
)

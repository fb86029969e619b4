"""ViTDet of transformers: relative positions decomposed into two axes, as in SAM."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.fallback import WEIGHTS, say_original
from flashbias_convert.recipe import Recipe

from .transformers_sam import SamVisionAttention, describe


class VitDetAttention(SamVisionAttention):
    """`VitDetAttention`."""

    num_heads: int

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)

    def flashbias_forward(  # type: ignore[override]
        self, hidden_state: Tensor, output_attentions: bool = False
    ) -> tuple[Tensor, ...]:
        if output_attentions:
            say_original(WEIGHTS)
            original: tuple[Tensor, ...] = self.original_forward(hidden_state, output_attentions)
            return original
        return (self.attend(hidden_state, self.num_heads),)

    def relative(self, size: int, table: Tensor) -> Tensor:
        from transformers.models.vitdet.modeling_vitdet import get_rel_pos

        found: Tensor = get_rel_pos(size, size, table)
        return found


recipe = Recipe(
    name="transformers_vitdet",
    title="ViTDet (transformers)",
    classes=("transformers.models.vitdet.modeling_vitdet.VitDetAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=VitDetAttention,
    describe=describe,
    about=About(
        models="ViTDet; any map",
        exact="rows and columns of relative positions, made of the queries of each call",
        n="196 and 4096",
    ),
)

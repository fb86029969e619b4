"""Triangle attention of Boltz-1 and Boltz-2."""

from __future__ import annotations

from flashbias_convert.about import About
from flashbias_convert.recipe import Recipe
from flashbias_convert.triangle_attention import TriangleAttention, describe, observe

recipe = Recipe(
    name="boltz_triangle",
    title="Boltz-1 and Boltz-2, triangle attention",
    classes=("boltz.model.layers.triangular_attention.attention.TriangleAttention",),
    library="boltz",
    tested=">=2.2,<2.3",
    attention=TriangleAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="triangle attention of Boltz-1 and Boltz-2, starting and ending node",
        exact="padding mask, pair bias shared by all rows",
        n="residues of the structure",
    ),
)

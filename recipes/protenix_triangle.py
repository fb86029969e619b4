"""Triangle attention of Protenix."""

from __future__ import annotations

from flashbias_convert.about import About
from flashbias_convert.recipe import Recipe
from flashbias_convert.triangle_attention import TriangleAttention, describe, observe

recipe = Recipe(
    name="protenix_triangle",
    title="Protenix, triangle attention",
    classes=("protenix.model.triangular.triangular.TriangleAttention",),
    library="protenix",
    tested=">=2.0,<2.1",
    attention=TriangleAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="triangle attention of Protenix, starting and ending node",
        exact="padding mask, pair bias shared by all rows",
        n="residues of the structure",
    ),
)

"""Triangle attention of OpenFold 2, the class that others follow."""

from __future__ import annotations

from flashbias_convert.about import About
from flashbias_convert.recipe import Recipe
from flashbias_convert.triangle_attention import TriangleAttention, describe, observe

recipe = Recipe(
    name="openfold_triangle",
    title="triangle attention (OpenFold)",
    classes=("openfold.model.triangular_attention.TriangleAttention",),
    library="openfold",
    tested=">=2.2,<2.3",
    attention=TriangleAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="triangle attention of OpenFold, starting and ending node",
        exact="padding mask, pair bias shared by all rows",
        n="residues of the structure",
        tested="the source of openfold 2.2 (not on PyPI), without its compiled extension",
    ),
)

"""Triangle attention of ESMFold in transformers."""

from __future__ import annotations

from flashbias_convert.about import About
from flashbias_convert.recipe import Recipe
from flashbias_convert.triangle_attention import TriangleAttention, describe, observe

recipe = Recipe(
    name="transformers_esmfold_triangle",
    title="ESMFold, triangle attention (transformers)",
    classes=("transformers.models.esm.modeling_esmfold.EsmFoldTriangleAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=TriangleAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="ESMFold, triangle attention, starting and ending node",
        exact="padding mask, pair bias shared by all rows",
        n="residues of the structure",
    ),
)

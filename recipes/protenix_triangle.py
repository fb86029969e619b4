"""Triangle attention of Protenix."""

from __future__ import annotations

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
)

"""Triangle attention of OpenFold 3, which can be told to turn its bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.recipe import Observed, Recipe
from flashbias_convert.triangle_attention import TriangleAttention, describe, triangle_call


class OpenFold3TriangleAttention(TriangleAttention):
    """`TriangleAttention`, and its ending node, which is a subclass without a forward."""

    def flashbias_forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        transpose_bias: bool = False,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return self.along_rows(*triangle_call(self, x, mask, turned=transpose_bias))


def observe(
    module: Any,
    x: Tensor,
    mask: Tensor | None = None,
    transpose_bias: bool = False,
    *_: Any,
    **__: Any,
) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    return triangle_call(module, x, mask, turned=transpose_bias)[1].observed()


recipe = Recipe(
    name="openfold3_triangle",
    title="triangle attention (OpenFold 3)",
    classes=("openfold3.core.model.layers.triangular_attention.TriangleAttention",),
    library="openfold3",
    tested=">=0.5,<0.6",
    attention=OpenFold3TriangleAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="triangle attention of OpenFold 3, starting and ending node",
        exact="padding mask, pair bias shared by all rows",
        n="residues of the structure",
    ),
)

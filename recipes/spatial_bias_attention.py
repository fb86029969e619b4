"""Neural-Solver-Library's Transformer with weighted distances, which runs FlashBias already."""

from __future__ import annotations

from torch import nn

from flashbias_convert.refused import refused
from flashbias_convert.trial import has_parts


def looks_like_it(module: nn.Module) -> bool:
    """Whether a module of the name has its projections, and the one that makes the weights."""
    return has_parts(module, "to_q", "to_k", "to_v", "pos_weight", kind=nn.Module)


recipe = refused(
    name="spatial_bias_attention",
    title="Transformer_Spatial_Bias (Neural-Solver-Library)",
    classes=("*.Spatial_Bias_Attention",),
    library="torch",
    tested=">=2.11,<2.15",
    models="Transformer_Spatial_Bias of thuml's Neural-Solver-Library",
    reason=(
        "it runs FlashBias's own kernel (flash_bias_func) with factors of its bias, weighted "
        "squared distances in 5 columns (4 of points in a plane), so there is no bias matrix to "
        "replace, and no recipe for another kernel under the same factors; "
        "flashbias_convert.models.pde_transformer has a solver with such a bias on this package's "
        "kernels, to be trained anew (scripts/paper/pde_solver.py trains and times it)"
    ),
    matches=looks_like_it,
    with_what="a stand-in for its class",
)

"""WavLM of Microsoft's repository: as BEATs, but the gate is made from queries not yet projected.

It hands all to torch's function for attention, which takes the weights of its layers and does not
call them. transformers' WavLM has a recipe of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.recipe import Owner, Recipe

from .gated_audio import (
    GatedAttention,
    GatedEncoder,
    calls_torchs,
    describe_gated,
    hands_on,
    looks_like_it,
)


class QueryGatedAttention(GatedAttention):
    """`MultiheadAttention` of WavLM."""

    bypassed = ()  # its dropout is a number for torch's function, in training mode alone

    def project(self, layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)

    def gate_source(self, query: Tensor, q: Tensor) -> Tensor:
        return query.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3)


def is_wavlm(module: nn.Module) -> bool:
    """Whether a module of the name has the parts, and leaves attention to torch."""
    return looks_like_it(module) and calls_torchs(module)


recipe = Recipe(
    name="gated_wavlm",
    title="WavLM (Microsoft's repository and copies)",
    classes=("*.MultiheadAttention:wavlm",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=QueryGatedAttention,
    describe=lambda site: describe_gated(site, QueryGatedAttention, "WavLM"),
    owners=(Owner(("*.TransformerEncoder",), GatedEncoder, when=hands_on),),
    matches=is_wavlm,
    about=About(
        models="WavLM in Microsoft's repository and copies of it, which are tried out first",
        exact="its bias of the distance times the gate of each query, padding",
        n="any: 50 a second",
        tested=(
            "github.com/microsoft/unilm at 768a3c87, where it is fetched; classes of the same "
            "interface"
        ),
    ),
)

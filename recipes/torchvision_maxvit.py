"""MaxViT of torchvision: attention in windows and grids, scaled by the width of all heads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site


class PartitionAttention(PatchedAttention):
    """`RelativePositionalMultiHeadAttention`: its scale is 1 / sqrt(H D), not 1 / sqrt(D)."""

    n_heads: int
    scale_factor: float
    to_qkv: nn.Linear
    merge: nn.Linear
    relative_position_bias_table: nn.Parameter
    relative_position_index: Tensor

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.relative_position_bias_table, self.relative_position_index)

    def flashbias_forward(self, x: Tensor) -> Tensor:
        chunks = self.to_qkv(x).chunk(3, dim=-1)  # (B, G, N, H D)
        q, k, v = (c.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2) for c in chunks)
        out = self.score_bias(q, k, v, scale=self.scale_factor)  # (B, G, H, N, D)
        return self.merge(out.transpose(-3, -2).flatten(-2))


def describe(site: Site) -> Description:
    """The bias by the module's own look-up."""
    module: Any = site.module
    n = module.max_seq_len
    return Description(
        bias=module.get_relative_positional_bias()[0],
        num_heads=module.n_heads,
        n=n,
        m=n,
        head_dim=module.head_dim,
        index=module.relative_position_index.view(n, n),
        shared=True,  # windows and grids of a map, none of which has a mask
    )


recipe = Recipe(
    name="torchvision_maxvit",
    title="MaxViT (torchvision)",
    classes=("torchvision.models.maxvit.RelativePositionalMultiHeadAttention",),
    library="torchvision",
    tested=">=0.29,<0.30",
    attention=PartitionAttention,
    describe=describe,
    about=About(
        models="MaxViT, whose scale is that of all heads together",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 49",
    ),
)

"""LeViT of transformers: a bias of absolute offsets, and downsampling by attention."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import require_index


class LevitAttention(PatchedAttention):
    """`LevitAttention` and `LevitAttentionSubsample`; their cache of biases is not used."""

    num_attention_heads: int
    scale: float
    key_dim: int
    attention_ratio: int
    attention_biases: nn.Parameter
    attention_bias_idxs: Tensor
    activation: nn.Module
    projection: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.attention_biases, tuple(self.attention_bias_idxs.shape))

    def flashbias_forward(self, hidden_state: Tensor) -> Tensor:
        q, k, v = self._project(hidden_state)
        out = self.score_bias(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)  # (B, N, C)
        projected: Tensor = self.projection(self.activation(out))
        return projected

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values: views, (B, H, N, D)."""
        own: Any = self
        sizes = [self.key_dim, self.attention_ratio * self.key_dim]
        if not hasattr(self, "keys_values"):
            return self._heads(own.queries_keys_values(x)).split([self.key_dim, *sizes], -1)
        q = self._heads(own.queries(own.queries_subsample(x)))  # of every second row and column
        return (q, *self._heads(own.keys_values(x)).split(sizes, -1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


def describe(site: Site) -> Description:
    """The bias looked up as the module does; it keeps its index as a list of numbers, too."""
    module: Any = site.module
    index = module.attention_bias_idxs
    require_index(index, torch.tensor(module.indices))
    n, m = index.shape
    return Description(
        bias=module.attention_biases[:, index],
        num_heads=module.num_attention_heads,
        n=n,
        m=m,
        head_dim=module.key_dim,
        index=index,
    )


_MODULE = "transformers.models.levit.modeling_levit"

recipe = Recipe(
    name="transformers_levit",
    title="LeViT (transformers)",
    classes=(f"{_MODULE}.LevitAttention", f"{_MODULE}.LevitAttentionSubsample"),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=LevitAttention,
    describe=describe,
    about=About(
        models="LeViT",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="16 to 196; where it downsamples, 16 x 49 and 49 x 196",
    ),
)

"""MPNet of transformers: its encoder makes one bias of the distance for all layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.built_terms import shared_table
from flashbias_convert.causal import attend_padded, is_key_table
from flashbias_convert.causal_owner import KeyTableOwner, bound_arguments
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.tables import require_shared_heads


class MPNetSelfAttention(PatchedAttention):
    """`MPNetSelfAttention`; the projections are the original's."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the encoder makes the table anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        if position_bias is None or position_bias.dim() != 2:
            given = (hidden_states, attention_mask, position_bias, output_attentions)
            original: tuple[Tensor, ...] = self.original_forward(*given, **kwargs)
            return original
        assert attention_mask is not None  # a key table: see `MPNetEncoder`
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        heads = (project(hidden_states).view(shape) for project in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        built = {"distance_table": {"table": position_bias, "n": q.shape[-2]}}
        out = attend_padded(self.score_bias, q, k, v, attention_mask, built=built)
        return (self.o(out.transpose(1, 2).flatten(2)),)


class MPNetEncoder(PatchedOwner):
    """`MPNetEncoder`, whose bias (B, H, N, N) becomes a table (H, 2 N - 1)."""

    relative_attention_bias: nn.Embedding

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        if not is_key_table(call.get("attention_mask")) or call.get("output_attentions"):
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(**call)

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.is_lean:
            dense: Tensor = super().compute_position_bias(x, *args, **kwargs)  # type: ignore[misc]
            return dense
        distance = torch.arange(1 - x.shape[1], x.shape[1], device=x.device)
        bucket = self.relative_position_bucket(distance)  # type: ignore[operator]
        return shared_table(self.relative_attention_bias(bucket).T)


def describe(site: Site) -> Description:
    """A table for each call: the bias depends on the distance alone."""
    module: Any = site.module
    owner: Any = site.owner
    n = site.tokens or owner.config.max_position_embeddings - 2  # two places are for padding
    heads, size = module.num_attention_heads, module.attention_head_size
    require_shared_heads(heads, owner.relative_attention_bias)
    return Description(None, heads, n, n, size, builders=("distance_table",))


_MODULE = "transformers.models.mpnet.modeling_mpnet"

recipe = Recipe(
    name="transformers_mpnet",
    title="MPNet (transformers)",
    classes=(f"{_MODULE}.MPNetSelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=MPNetSelfAttention,
    describe=describe,
    owners=(
        Owner((f"{_MODULE}.MPNetEncoder",), MPNetEncoder),
        Owner((f"{_MODULE}.MPNetModel",), KeyTableOwner),
    ),
    about=About(
        models="MPNet, all-mpnet-base-v2 included; padding",
        exact="its bias of the distance: a table of 2 N - 1 numbers a head, made once a call",
        n="up to 512",
    ),
)

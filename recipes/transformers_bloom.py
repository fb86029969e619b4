"""BLOOM of transformers: ALiBi whose positions skip the padding of each row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal import attend_causal, is_key_table, query_start
from flashbias_convert.causal_owner import CausalOwner, PaddingMaskInGenerate
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.terms import Alibi


class BloomAttention(PatchedAttention):
    """`BloomAttention`; projections and residual are the original's."""

    bypassed = ("attention_dropout",)
    head_counts = ("num_heads",)
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"query_key_value": 1})

    num_heads: int
    inv_norm_factor: float
    layer_idx: int
    query_key_value: nn.Linear
    dense: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not is_key_table(attention_mask):
            given = (hidden_states, residual, alibi, attention_mask, layer_past)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        q, k, v = self._reshape(self.query_key_value(hidden_states))  # type: ignore[operator]
        start = query_start(layer_past, self.layer_idx)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        out = attend_causal(
            self.score_bias, q, k, v, attention_mask,
            start=start, scale=self.inv_norm_factor,
            builder="padded_alibi",
            own=("slopes",), inputs={"start": start, "n": q.shape[-2]},
        )  # fmt: skip
        return self.dense(out.transpose(1, 2).flatten(2)) + residual, None


class BloomModel(CausalOwner):
    """`BloomModel`, without the bias vector of every head and row of the batch."""

    def build_alibi_tensor(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return None if self.is_lean else super().build_alibi_tensor(*args, **kwargs)  # type: ignore[misc]


def describe(site: Site) -> Description:
    """Slopes from the model's own bias for two tokens."""
    module: Any = site.module
    owner: Any = site.owner
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedSite("it emulates tensor parallelism (slow_but_exact)")
    if not getattr(owner.config, "is_causal", True):
        raise UnsupportedSite("it is configured to attend in both directions")
    two = torch.ones(1, 2, device=module.dense.weight.device)
    slopes = owner.build_alibi_tensor(two, module.num_heads, torch.float32)[:, 0, 1]
    n = int(site.tokens or getattr(owner.config, "seq_length", None) or 2048)
    return Description(
        None,
        module.num_heads,
        n,
        n,
        module.head_dim,
        exact_terms=(Alibi(slopes=slopes),),
        builders=("padded_alibi",),
    )


_MODULE = "transformers.models.bloom.modeling_bloom"

recipe = Recipe(
    name="transformers_bloom",
    title="BLOOM (transformers)",
    classes=(f"{_MODULE}.BloomAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=BloomAttention,
    describe=describe,
    owners=(
        Owner((f"{_MODULE}.BloomModel",), BloomModel),
        # for static caches, transformers 5.18 to 5.20 makes a mask that the original cannot use
        Owner((f"{_MODULE}.BloomForCausalLM",), PaddingMaskInGenerate),
    ),
    about=About(
        models="BLOOM, with padding, dynamic and static caches",
        exact="ALiBi; integers instead of a vector rounded to the model's dtype",
    ),
)

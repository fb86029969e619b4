"""ALiBi GPT-2 of this package: bias and mask of linear size."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal import (
    attend_causal,
    is_key_table,
    key_table,
    query_start,
)
from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Attention
from flashbias_convert.models.caches import (
    cached_sizes,
    fixed_length,
    padded_to,
    token_slots,
)
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site
from flashbias_convert.terms import Alibi


class FusedAttention(PatchedAttention):
    """`AlibiGPT2Attention`; the projections are the original's."""

    bypassed = ("attn_dropout",)

    layer_idx: int
    num_heads: int
    scale: float
    c_attn: nn.Module
    c_proj: nn.Module
    resid_dropout: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        bias: Tensor,
        attention_mask: Tensor,
        cache: Any = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        if not is_key_table(attention_mask):
            given = (hidden_states, bias, attention_mask, cache, cache_position)
            original: Tensor = self.original_forward(*given)
            return original
        qkv = self.c_attn(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        start = query_start(cache, self.layer_idx, cache_position)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, {"cache_position": cache_position})
        out = attend_causal(
            self.score_bias, q, k, v, attention_mask,
            start=start, scale=self.scale,
            builder="padded_alibi",
            own=("slopes",), inputs={"start": start, "n": q.shape[-2]},
        )  # fmt: skip
        done: Tensor = self.resid_dropout(self.c_proj(out.transpose(1, 2).flatten(2)))
        return done


class LeanModel(PatchedOwner):
    """`AlibiGPT2Model`, without the bias (B, H, N, M) and the mask (B, 1, N, M)."""

    slopes: Tensor

    def fixed_sources(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    def _bias_and_mask(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_lean:
            made: tuple[Tensor, Tensor, Tensor] = super()._bias_and_mask(  # type: ignore[misc]
                hidden, attention_mask, cache
            )
            return made
        n, device = hidden.shape[1], hidden.device
        start, m = cached_sizes(cache, n)
        slots = token_slots(start, n, device)
        if attention_mask is not None:  # refused as by the original, if it does not fit
            padded_to(attention_mask, m, exact=fixed_length(cache) is None)
        return torch.empty(0, device=device), key_table(attention_mask, device), slots


def describe(site: Site) -> Description:
    """The slopes are a buffer of the model."""
    module: Any = site.module
    owner: Any = site.owner
    assert isinstance(module, AlibiGPT2Attention)
    n = site.tokens or owner.config.n_positions
    term = Alibi(slopes=owner.slopes.float())
    return Description(
        None,
        module.num_heads,
        n,
        n,
        module.head_dim,
        exact_terms=(term,),
        builders=("padded_alibi",),
    )


_MODULE = "flashbias_convert.models.alibi_gpt2"

recipe = Recipe(
    name="alibi_gpt2",
    title="GPT-2 with ALiBi (this package)",
    classes=(f"{_MODULE}.AlibiGPT2Attention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=FusedAttention,
    describe=describe,
    owners=(Owner((f"{_MODULE}.AlibiGPT2Model",), LeanModel),),
    about=About(
        models="GPT-2 with ALiBi, `flashbias_convert.models.alibi_gpt2`",
        exact="ALiBi",
        tested="transformers 5.16 to 5.24",
    ),
)

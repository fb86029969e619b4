"""Falcon of transformers, where it uses ALiBi: a bias that the model rounds to bfloat16."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal import attend_causal, is_key_table, query_start
from flashbias_convert.causal_owner import CausalOwner, PaddingMaskInGenerate
from flashbias_convert.kept import kept_with
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.terms import Alibi


class FalconAttention(PatchedAttention):
    """`FalconAttention`; the projections are the original's."""

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
        alibi: Tensor | None,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not is_key_table(attention_mask):
            given = (hidden_states, alibi, attention_mask, position_ids, layer_past)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        heads = self._split_heads(self.query_key_value(hidden_states))  # type: ignore[operator]
        q, k, v = (x.transpose(1, 2) for x in heads)  # (B, H or fewer, N, D)
        start = query_start(layer_past, self.layer_idx)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        keys = attention_mask
        if keys.shape[-1] == 0:  # nothing is padded, but the rounded bias needs the places
            batch, m = q.shape[0], k.shape[-2]
            keys = kept_with(keys, ("places", batch, m), partial(all_places, batch, m, k.device))
        out = attend_causal(
            self.score_bias, q, k, v, keys,
            start=start, scale=self.inv_norm_factor,
            builder="rounded_alibi",
            own=("slopes",), inputs={"unit": self.inv_norm_factor, "dtype": q.dtype},
        )  # fmt: skip
        return self.dense(out.transpose(1, 2).flatten(2)), None


def all_places(batch: int, keys: int, device: torch.device) -> Tensor:
    """A key table (B, 1, 1, M) of rows without padding."""
    places = torch.arange(1, keys + 1, dtype=torch.int32, device=device)
    return places.expand(batch, 1, 1, -1)


class FalconModel(CausalOwner):
    """`FalconModel`, without the bias (B, H, N, M) that it adds to its mask."""

    @property
    def use_alibi(self) -> bool:
        """Off while the attention modules add the bias; then the model makes none."""
        return bool(self.config.alibi) and not self.is_lean  # type: ignore[union-attr]


def describe(site: Site) -> Description:
    """Slopes from the model's own bias for two tokens, in the units of its scores."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    module: Any = site.module
    owner: Any = site.owner
    if not owner.use_alibi:
        raise NoBias("it uses rotary positions, no bias")
    if not getattr(owner.config, "is_causal", True):
        raise UnsupportedSite("it is configured to attend in both directions")
    two = torch.ones(1, 2, dtype=torch.long, device=module.dense.weight.device)
    slopes = build_alibi_tensor(two, module.num_heads, torch.float32)[:, 0, 1]
    n = site.tokens or module.max_position_embeddings
    term = Alibi(slopes=slopes * module.inv_norm_factor)
    # with eager attention the model adds its bias to the mask and once more to the scores
    twice = getattr(owner.config, "_attn_implementation", "sdpa") == "eager"
    warnings = (
        ("eager attention adds this bias twice; converted as with sdpa, once",) if twice else ()
    )
    return Description(
        None,
        module.num_heads,
        n,
        n,
        module.head_dim,
        exact_terms=(term,),
        builders=("rounded_alibi",),
        warnings=warnings,
    )


_MODULE = "transformers.models.falcon.modeling_falcon"

recipe = Recipe(
    name="transformers_falcon",
    title="Falcon with ALiBi (transformers)",
    classes=(f"{_MODULE}.FalconAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=FalconAttention,
    describe=describe,
    owners=(
        Owner((f"{_MODULE}.FalconModel",), FalconModel),
        Owner((f"{_MODULE}.FalconForCausalLM",), PaddingMaskInGenerate),
    ),
    about=About(
        models="Falcon with ALiBi (falcon-rw); static caches, too, which the original refuses",
        exact="the model's own rounding of its bias to bfloat16",
    ),
)

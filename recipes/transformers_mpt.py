"""MPT of transformers: ALiBi counted from the last key; its table no longer bounds the length."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal import attend_causal, cache_of_call, query_start
from flashbias_convert.causal_owner import CausalOwner, PaddingMaskInGenerate
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.terms import Alibi


class MptAttention(PatchedAttention):
    """`MptAttention`; the projections are the original's."""

    head_counts = ("n_heads",)
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"Wqkv": 3})

    n_heads: int
    softmax_scale: float
    clip_qkv: float | None
    layer_idx: int
    Wqkv: nn.Linear
    out_proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.n_heads,)

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = cache_of_call(cache, kwargs)
        if position_bias is None or position_bias.dim() != 1:
            given = (hidden_states, position_bias, cache, attention_mask)
            original: tuple[Tensor, Tensor | None] = self.original_forward(*given, **kwargs)
            return original
        assert attention_mask is not None  # a key table, of which the model keeps whether 0
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        start = query_start(cache, self.layer_idx)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = attend_causal(
            self.score_bias, q, k, v, attention_mask, start=start, scale=self.softmax_scale
        )
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class MptModel(CausalOwner):
    """`MptModel`, without the bias vector as long as its longest sequence."""

    def build_mpt_alibi_tensor(self, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if self.is_lean:  # of a shape that an attention module which is not patched refuses
            return torch.empty(0, device=device)
        built: Tensor = super().build_mpt_alibi_tensor(*args, device=device, **kwargs)  # type: ignore[misc]
        return built


def describe(site: Site) -> Description:
    """Slopes from the model's own bias for two tokens; it is built even if `alibi` is off."""
    module: Any = site.module
    owner: Any = site.owner
    if not getattr(owner.config, "is_causal", True):
        raise UnsupportedSite("it is configured to attend in both directions")
    device = module.Wqkv.weight.device
    slopes = -owner.build_mpt_alibi_tensor(module.n_heads, 2, device=device)[:, 0, 0]
    n = site.tokens or module.max_seq_length
    return Description(
        None, module.n_heads, n, n, module.head_dim, exact_terms=(Alibi(slopes=slopes),)
    )


_MODULE = "transformers.models.mpt.modeling_mpt"

recipe = Recipe(
    name="transformers_mpt",
    title="MPT (transformers)",
    classes=(f"{_MODULE}.MptAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=MptAttention,
    describe=describe,
    owners=(
        Owner((f"{_MODULE}.MptModel",), MptModel),
        Owner((f"{_MODULE}.MptForCausalLM",), PaddingMaskInGenerate),
    ),
    about=About(
        models="MPT; longer than its table of positions, too",
        exact="ALiBi",
    ),
)

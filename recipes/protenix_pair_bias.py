"""Attention with pair bias of Protenix: Pairformer, and diffusion over tokens.

Its attention between windows of atoms is another kind and stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.pair_attention import PairAttention, PairCall, described, gate_of
from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import projected_pairs
from flashbias_convert.recipe import Description, Observed, Recipe, Site, UnsupportedSite


class ProtenixAttentionPairBias(PairAttention):
    """`AttentionPairBias` (AlphaFold 3, algorithm 24) between all tokens; there is no mask."""

    taken_apart = ("attention",)

    has_s: bool
    attention: nn.Module
    layernorm_a: nn.Module
    layernorm_z: nn.Module
    linear_nobias_z: nn.Linear
    linear_a_last: nn.Linear

    def bias_weights(self) -> tuple[Tensor, ...]:
        return (self.linear_nobias_z.weight, *self.layernorm_z.parameters())

    def flashbias_forward(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor,
        n_queries: int | None = None,
        n_keys: int | None = None,
        inplace_safe: bool = False,
        chunk_size: int | None = None,
        enable_efficient_fusion: bool = False,
    ) -> Tensor:
        # the original takes pairs with fewer dimensions, too, and spreads their heads over samples
        if (n_queries and n_keys) or z.dim() != a.dim() + 1:
            options = (n_queries, n_keys, inplace_safe, chunk_size, enable_efficient_fusion)
            original: Tensor = self.original_forward(a, s, z, *options)
            return original
        normed, call = pair_bias_call(self, a, s, z, enable_efficient_fusion)
        out = self.attend(call, gate_of(self.attention, normed))  # (*, H, N, D)
        merged: Tensor = self.attention.linear_o(out.transpose(-2, -3).flatten(-2))  # type: ignore[operator]
        return self.linear_a_last(s).sigmoid() * merged if self.has_s else merged


def pair_bias_call(
    module: Any, a: Tensor, s: Tensor, z: Tensor, fused: bool
) -> tuple[Tensor, PairCall]:
    """The tokens behind their norm, (*, N, C), and what they attend with.

    Args:
        module: the attention, patched or not.
        a, s: tokens and what conditions them, shape (*, N, C).
        z: pair representation, shape (*, N, N, C).
        fused: z is normalised already and has its channels first, (*, C, N, N).
    """
    normed = module.layernorm_a(a=a, s=s) if module.has_s else module.layernorm_a(a)
    q, k, v = module.attention._prep_qkv(normed, normed)  # (*, H, N, D), q scaled

    def bias() -> Tensor:
        if fused:
            weight = module.linear_nobias_z.weight * module.layernorm_z.weight
            return F.conv2d(z, weight[:, :, None, None])
        return projected_pairs(module, z, module.linear_nobias_z, module.layernorm_z)

    def features() -> Tensor:
        return pair_features(z.movedim(-3, -1) if fused else module.layernorm_z(z))

    in_trunk = not module.has_s and z.shape[:-3] == a.shape[:-2]
    single = normed if in_trunk else None
    return normed, PairCall(q, k, v, z, bias=bias, features=features, single=single)


def observe(
    module: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor,
    *_: Any,
    enable_efficient_fusion: bool = False,
    **__: Any,
) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    return pair_bias_call(module, a, s, z, enable_efficient_fusion)[1].observed()


def describe(site: Site) -> Description:
    """A dense term, made in each call.

    Raises:
        UnsupportedSite: it attends between windows of atoms.
    """
    module: Any = site.module
    if module.cross_attention_mode:
        raise UnsupportedSite("it attends between windows of atoms")
    pairs = Pairs(module.linear_nobias_z.weight.shape[1], "norm and linear", normed=True)
    return described(module.n_heads, site.tokens, module.attention.c_hidden, pairs)


recipe = Recipe(
    name="protenix_pair_bias",
    title="Protenix, attention with pair bias",
    classes=("protenix.model.modules.transformer.AttentionPairBias",),
    library="protenix",
    tested=">=2.0,<2.1",
    attention=ProtenixAttentionPairBias,
    describe=describe,
    observe=observe,
    about=About(
        models="pairformer and diffusion transformer of Protenix",
        exact="padding mask, pair bias (or factors once per structure, `factors_once`)",
        n="residues of the structure",
    ),
)

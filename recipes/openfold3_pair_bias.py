"""Attention with pair bias of OpenFold 3: Pairformer, and diffusion over tokens.

Its attention between windows of atoms is another kind and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.pair_attention import PairAttention, PairCall, described, gate_of
from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import projected_pairs
from flashbias_convert.recipe import Description, Observed, Recipe, Site, UnsupportedSite


class OpenFold3AttentionPairBias(PairAttention):
    """`AttentionPairBias` and `DiffusionAttentionPairBias`. A mask holds ones and zeros.

    Arguments that choose a kernel, or its precision, are ignored: scores are fp32 in any case. A
    structure without any token that counts gives zeros, not a mean of padding.
    """

    taken_apart = ("mha",)

    mha: nn.Module
    linear_z: nn.Linear
    linear_ada_out: nn.Linear

    def bias_weights(self) -> tuple[Tensor, ...]:
        norm = getattr(self, "layer_norm_z", None)
        return (self.linear_z.weight, *(() if norm is None else norm.parameters()))

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = bound_arguments(self.original_class.forward, self, args, kwargs)
        if arguments["z"].dim() != arguments["a"].dim() + 1:  # shared in a way that heads follow
            original: Tensor = self.original_forward(*args, **kwargs)
            return original
        normed, call = pair_bias_call(self, arguments)
        out = self.attend(call, gate_of(self.mha, normed))  # (*, H, N, D)
        merged: Tensor = self.mha.linear_o(out.transpose(-2, -3).flatten(-2))  # type: ignore[operator]
        if arguments.get("s") is None:
            return merged
        return self.linear_ada_out(arguments["s"]).sigmoid() * merged


def pair_bias_call(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, PairCall]:
    """The tokens behind their norm, (*, N, C), and what they attend with.

    Args:
        module: the attention, patched or not.
        arguments: of its forward, by name: `a` and, in the diffusion, what conditions it, `s`,
            (*, N, C), pairs `z` (*, N, N, C), where a dimension that they share has size 1, and
            `mask` (*, N) or None.
    """
    a, z, mask, s = (arguments.get(name) for name in ("a", "z", "mask", "s"))
    assert a is not None and z is not None
    normed = module.layer_norm_a(a) if s is None else module.layer_norm_a(a, s)
    q, k, v = module.mha._prep_qkv(normed, normed)  # (*, H, N, D), q scaled
    seen = None if mask is None else (mask == 1).expand(a.shape[:-1])
    tokens = seen
    for at, size in enumerate(z.shape[:-3]):  # which tokens count is the same for all samples
        tokens = tokens if tokens is None or size > 1 else tokens.narrow(at, 0, 1)

    norm = getattr(module, "layer_norm_z", None)
    return normed, PairCall(
        q, k, v, z,
        bias=lambda: projected_pairs(module, z, module.linear_z, norm),
        features=lambda: pair_features(z if norm is None else norm(z), mask=tokens),
        single=normed if s is None and z.shape[:-3] == a.shape[:-2] else None,
        key_mask=seen,
        tokens=tokens,
    )  # fmt: skip


def observe(module: Any, *args: Any, **kwargs: Any) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    arguments = bound_arguments(type(module).forward, module, args, kwargs)
    return pair_bias_call(module, arguments)[1].observed()


def describe(site: Site) -> Description:
    """A dense term, made in each call.

    Raises:
        UnsupportedSite: it attends between windows of atoms.
    """
    module: Any = site.module
    if hasattr(module, "n_query"):
        raise UnsupportedSite("it attends between windows of atoms")
    channels, normed = module.linear_z.weight.shape[1], hasattr(module, "layer_norm_z")
    pairs = Pairs(channels, "norm and linear" if normed else "linear", normed=normed)
    return described(module.mha.no_heads, site.tokens, module.mha.c_hidden, pairs)


_MODULE = "openfold3.core.model.layers.attention_pair_bias"

recipe = Recipe(
    name="openfold3_pair_bias",
    title="OpenFold 3, attention with pair bias",
    classes=(
        f"{_MODULE}.AttentionPairBias",
        f"{_MODULE}.DiffusionAttentionPairBias",
        f"{_MODULE}.CrossAttentionPairBias",
    ),
    library="openfold3",
    tested=">=0.5,<0.6",
    attention=OpenFold3AttentionPairBias,
    describe=describe,
    observe=observe,
    about=About(
        models="pairformer and diffusion transformer of OpenFold 3; not its windows of atoms",
        exact="padding mask, pair bias (or factors once per structure, `factors_once`)",
        n="residues of the structure",
    ),
)

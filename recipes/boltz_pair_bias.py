"""Attention with pair bias of Boltz-1 and Boltz-2: Pairformer, and diffusion over tokens and atoms.

In the diffusion one pair representation serves several samples of each structure, side by side in
the batch; here they become a dimension of their own, which the bias does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.pair_attention import PairAttention, PairCall, described
from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import is_uncalled, projected_pairs
from flashbias_convert.recipe import Description, Observed, Recipe, Site


class BoltzAttentionPairBias(PairAttention):
    """`AttentionPairBias` of both versions. A mask holds ones and zeros."""

    proj_g: nn.Linear
    proj_o: nn.Linear
    proj_z: nn.Module

    def bias_weights(self) -> tuple[Tensor, ...]:
        return tuple(self.proj_z.parameters())

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = bound_arguments(self.original_class.forward, self, args, kwargs)
        normed, call = pair_bias_call(self, arguments)
        gate = self.proj_g(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = self.attend(call, gate.unflatten(0, call.q.shape[:2]))  # (B, samples, H, N, D)
        return self.proj_o(out.flatten(0, 1).transpose(1, 2).flatten(2))


def pair_bias_call(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, PairCall]:
    """The single representation behind its norm, (B * samples, N, C), and what it attends with.

    Args:
        module: the attention, patched or not.
        arguments: of its forward, by name. Boltz-1 has `to_keys` for windows of atoms and a cache
            for the projected bias, Boltz-2 has the input of the keys, `k_in`.
    """
    s, z, mask = (arguments[name] for name in ("s", "z", "mask"))
    if getattr(module, "initial_norm", False):
        s = module.norm_s(s)
    to_keys, k_in = arguments.get("to_keys"), arguments.get("k_in", s)
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    samples = arguments.get("multiplicity", 1)

    def heads(x: Tensor) -> Tensor:
        own = x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        return own.unflatten(0, (-1, samples))  # (B, samples, H, N, D)

    q, k, v = heads(module.proj_q(s)), heads(module.proj_k(k_in)), heads(module.proj_v(k_in))
    cache = arguments.get("model_cache")

    def bias() -> Tensor:
        made = _projected(module, z) if cache is None or "z" not in cache else cache["z"]
        if cache is not None:
            cache["z"] = made
        return made.unsqueeze(1)  # (B, 1, H, N, M)

    seen = (mask == 1).expand(s.shape[0], -1).unflatten(0, (-1, samples))
    call = PairCall(
        q, k, v, z,
        bias=bias,
        features=lambda: pair_features(z, mask=seen[:, 0]).unsqueeze(1),
        single=s.unsqueeze(1) if samples == 1 and _in_trunk(module) else None,
        key_mask=seen,
        tokens=seen[:, :1],
        scale=module.head_dim**-0.5,
    )  # fmt: skip
    return s, call


def _projected(module: Any, z: Tensor) -> Tensor:
    """(B, H, N, M); what is not a norm, a linear layer and heads in front is asked itself."""
    layers = list(module.proj_z) if type(module.proj_z) is nn.Sequential else []
    usual = len(layers) == 3 and getattr(layers[2], "pattern", None) == "b ... h -> b h ..."
    if not usual or not is_uncalled(module.proj_z) or not is_uncalled(layers[2]):
        made: Tensor = module.proj_z(z)
        return made
    return projected_pairs(module, z, layers[1], layers[0])


def _in_trunk(module: Any) -> bool:
    """The diffusion norms its tokens itself (Boltz-1) or projects the bias itself (Boltz-2)."""
    if hasattr(module, "initial_norm"):
        return bool(module.initial_norm)
    return bool(getattr(module, "compute_pair_bias", False))


def observe(module: Any, *args: Any, **kwargs: Any) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    arguments = bound_arguments(type(module).forward, module, args, kwargs)
    return pair_bias_call(module, arguments)[1].observed()


def describe(site: Site) -> Description:
    """A dense term, made in each call, or handed over by the diffusion of Boltz-2."""
    module: Any = site.module
    layers = [layer for layer in module.proj_z.modules() if isinstance(layer, nn.Linear)]
    pairs = Pairs(module.num_heads, "laying out")  # of the diffusion: projected once, or elsewhere
    if layers and _in_trunk(module):
        pairs = Pairs(layers[0].in_features, "norm and linear")
    return described(module.num_heads, site.tokens, module.head_dim, pairs)


recipe = Recipe(
    name="boltz_pair_bias",
    title="Boltz-1 and Boltz-2, attention with pair bias",
    classes=(
        "boltz.model.layers.attention.AttentionPairBias",
        "boltz.model.layers.attentionv2.AttentionPairBias",
    ),
    library="boltz",
    tested=">=2.2,<2.3",
    attention=BoltzAttentionPairBias,
    describe=describe,
    observe=observe,
    about=About(
        models="pairformer and diffusion transformer of Boltz-1 and Boltz-2",
        exact="padding mask, pair bias (or factors once per structure, `factors_once`)",
        n="residues of the structure",
    ),
)

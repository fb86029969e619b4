"""Row attention of OpenFold's MSA with pair bias (AlphaFold 2, algorithm 7).

All sequences of an alignment share one bias, which is projected from the pair representation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.pair_attention import PairAttention, PairCall, described, gate_of
from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import projected_pairs
from flashbias_convert.recipe import Description, NoBias, Observed, Recipe, Site

#: of an alignment, as AlphaFold 2 clusters it; a model does not say
SEQUENCES = 512


class MSARowAttention(PairAttention):
    """`MSAAttention` with pairs; projections and gate stay with its `mha`.

    Arguments that choose a kernel, or chunks, are ignored: no scores are in memory. A mask holds
    ones and zeros. A sequence without any residue that counts gives zeros, not a mean of padding.
    """

    taken_apart = ("mha",)

    layer_norm_z: nn.Module
    linear_z: nn.Linear
    mha: nn.Module

    def bias_weights(self) -> tuple[Tensor, ...]:
        return (self.linear_z.weight, *self.layer_norm_z.parameters())

    def flashbias_forward(
        self,
        m: Tensor,
        z: Tensor | None = None,
        mask: Tensor | None = None,
        *args: Any,
        **more: Any,
    ) -> Tensor:
        if z is None:  # such a call adds no bias
            original: Tensor = self.original_forward(m, z, mask, *args, **more)
            return original
        normed, call = row_call(self, m, z, mask)
        out = self.attend(call, gate_of(self.mha, normed))  # (*, S, H, N, D)
        merged: Tensor = self.mha.linear_o(out.transpose(-2, -3).flatten(-2))  # type: ignore[operator]
        return merged


def row_call(module: Any, m: Tensor, z: Tensor, mask: Tensor | None) -> tuple[Tensor, PairCall]:
    """The alignment behind its norm, (*, S, N, C), and what its rows attend with.

    Args:
        module: the attention, patched or not.
        m: alignment of S sequences, shape (*, S, N, C).
        z: pair representation, shape (*, N, N, C').
        mask: ones and zeros, shape (*, S, N), or None.
    """
    normed = module.layer_norm_m(m)
    q, k, v = module.mha._prep_qkv(normed, normed)  # (*, S, H, N, D), q scaled
    seen = None if mask is None else mask == 1
    tokens = None if seen is None else seen.any(-2)  # some sequence has a residue there

    return normed, PairCall(
        q, k, v, z,
        bias=lambda: projected_pairs(  # (*, 1, H, N, N)
            module, z, module.linear_z, module.layer_norm_z
        ).unsqueeze(-4),
        features=lambda: pair_features(module.layer_norm_z(z), mask=tokens).unsqueeze(-3),
        key_mask=seen,
        tokens=None if tokens is None else tokens.unsqueeze(-2),
    )  # fmt: skip


def observe(
    module: Any, m: Tensor, z: Tensor, mask: Tensor | None = None, *_: Any, **__: Any
) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    return row_call(module, m, z, mask)[1].observed()


def describe(site: Site) -> Description:
    """A dense term, made in each call.

    Raises:
        NoBias: it attends along columns, without pairs.
    """
    module: Any = site.module
    if not module.pair_bias:
        raise NoBias("it attends without pair bias")
    pairs = Pairs(module.linear_z.weight.shape[1], "norm and linear", SEQUENCES, normed=True)
    return described(module.no_heads, site.tokens, module.c_hidden, pairs)


recipe = Recipe(
    name="openfold_msa",
    title="row attention of alignments with pair bias (OpenFold, OpenFold 3)",
    classes=(
        "openfold.model.msa.MSAAttention",
        "openfold3.core.model.layers.msa.MSAAttention",
    ),
    library="openfold",
    tested=">=2.2,<2.3",
    attention=MSARowAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="row attention of alignments in OpenFold's Evoformer, extra sequences included",
        exact="padding mask, pair bias shared by all sequences",
        n="residues of the structure",
        tested="openfold 2.2 (its source, without its compiled extension) and openfold3 0.5",
    ),
)

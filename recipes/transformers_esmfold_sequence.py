"""Attention of ESMFold's sequence with a bias from its pairs, in transformers.

The block projects the bias and hands it over with channels last. Weights of the attention, which
the original returns and the model drops, are not made.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.pair_attention import PairAttention, PairCall, described
from flashbias_convert.pair_features import pair_features
from flashbias_convert.recipe import Description, Observed, Recipe, Site


class EsmFoldSelfAttention(PairAttention):
    """`EsmFoldSelfAttention`; its gate and its projections are the original's."""

    num_heads: int
    gated: bool
    proj: nn.Linear
    o_proj: nn.Linear
    g_proj: nn.Linear

    def bias_weights(self) -> tuple[Tensor, ...]:
        return ()  # the block projects it

    def flashbias_forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        indices: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        if bias is None:
            original: tuple[Tensor, Tensor] = self.original_forward(x, mask, bias, indices)
            return original
        gate = None
        if self.gated:
            gate = self.g_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
        out = self.attend(sequence_call(self, x, mask, bias), gate)
        return self.o_proj(out.transpose(-2, -3).flatten(-2)), None


def sequence_call(module: Any, x: Tensor, mask: Tensor | None, bias: Tensor) -> PairCall:
    """What the tokens attend with.

    Args:
        module: the attention, patched or not.
        x: shape (B, L, C).
        mask: not zero for tokens that count, shape (B, L), or None.
        bias: shape (B, L, L, H).
    """
    qkv = module.proj(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    q, k, v = qkv.chunk(3, dim=-1)  # (B, H, L, D)
    seen = None if mask is None else mask != 0
    return PairCall(
        q, k, v, bias,
        bias=lambda: bias.movedim(-1, -3),
        features=lambda: pair_features(bias, x, seen),
        key_mask=seen,
        tokens=seen,
        scale=module.rescale_factor,
    )  # fmt: skip


def observe(
    module: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, *_: Any
) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    if bias is None:
        raise ValueError("a call without a bias has nothing to fit to")
    return sequence_call(module, x, mask, bias).observed()


def describe(site: Site) -> Description:
    """A dense term, which the block hands over in each call."""
    module: Any = site.module
    pairs = Pairs(module.num_heads, "laying out")  # the block projects them for its sites
    return described(module.num_heads, site.tokens, module.head_width, pairs)


recipe = Recipe(
    name="transformers_esmfold_sequence",
    title="ESMFold, attention with pair bias (transformers)",
    classes=("transformers.models.esm.modeling_esmfold.EsmFoldSelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=EsmFoldSelfAttention,
    describe=describe,
    observe=observe,
    about=About(
        models="ESMFold, sequence attention of the trunk",
        exact="padding mask, pair bias (or factors once per structure, `factors_once`)",
        n="residues of the structure",
    ),
)

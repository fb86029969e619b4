"""ALiBi as in github.com/jaketae/alibi: slopes in a buffer, scores divided by sqrt(d_model)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.terms import Alibi


class ALiBiMultiHeadAttention(PatchedAttention):
    """`ALiBiMultiHeadAttention`, causal or not; the projection is the original's."""

    causal: bool
    num_heads: int
    scale: float
    m: Tensor
    mask: Tensor
    kqv: nn.Linear
    dropout: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.m, self.num_heads)

    def flashbias_forward(self, x: Tensor) -> Tensor:
        longest = self.mask.shape[-1] if self.causal else x.shape[1]
        if x.shape[1] > longest:
            raise ValueError(f"{x.shape[1]} tokens are more than its max_len, {longest}")
        chunks = self.kqv(x).chunk(3, dim=-1)
        k, q, v = (c.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for c in chunks)
        out = self.score_bias(q, k, v, scale=1 / self.scale, causal=self.causal)
        return self.dropout(out.transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    """Slopes times (key minus query), also where later keys are seen: their bias is positive."""
    module = site.module
    slopes, heads = module.m, module.num_heads
    assert isinstance(slopes, Tensor) and isinstance(heads, int)
    # an adapter or a quantised layer has sizes, too, and is called like any other
    width = cast("nn.Linear", module.kqv).in_features
    mask = getattr(module, "mask", None)
    n = site.tokens or (512 if mask is None else mask.shape[-1])
    term = Alibi(slopes=slopes.detach().float().flatten())
    return Description(None, heads, n, n, width // heads, exact_terms=(term,))


recipe = Recipe(
    name="jaketae_alibi",
    title="ALiBi (github.com/jaketae/alibi)",
    classes=("alibi.attention.ALiBiMultiHeadAttention",),
    library="alibi",
    tested=">=0",
    attention=ALiBiMultiHeadAttention,
    describe=describe,
    about=About(
        models="the class of github.com/jaketae/alibi",
        exact="ALiBi, causal or not",
        tested=(
            "github.com/jaketae/alibi at 021acae3, where it is fetched; a class of the same "
            "interface"
        ),
    ),
)

"""What recipes for triangle attention share: OpenFold's class, and those that follow it.

Row i of the pair representation attends along it, and all rows share one bias, which is projected
from the same representation (AlphaFold 2, algorithms 13 and 14). The ending node is the same on
the transpose.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .decompose.pair_times import Pairs
from .pair_attention import PairAttention, PairCall, described, gate_of
from .pair_features import pair_features
from .pair_projection import projected_pairs
from .recipe import Description, Observed, Site


class TriangleAttention(PairAttention):
    """`TriangleAttention`; projections and gate stay with its `mha`.

    Arguments that choose a kernel, or chunks for the rows, are ignored: no scores are in memory. A
    mask holds ones and zeros. A row without any visible key gives zeros, not a mean of padding.
    """

    taken_apart = ("mha",)

    starting: bool
    layer_norm: nn.Module
    mha: nn.Module

    def bias_weights(self) -> tuple[Tensor, ...]:
        norm, own = self.layer_norm, projection(self)
        weights = (own.weight, getattr(norm, "weight", None), getattr(norm, "bias", None))
        return tuple(w for w in weights if isinstance(w, Tensor))

    def flashbias_forward(
        self, x: Tensor, mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        return self.along_rows(*triangle_call(self, x, mask))

    def along_rows(self, normed: Tensor, call: PairCall) -> Tensor:
        """The output for what `triangle_call` found, shape (*, I, J, C) or, at its end, turned."""
        out = self.attend(call, gate_of(self.mha, normed))  # (*, I, H, J, D)
        merged: Tensor = self.mha.linear_o(out.transpose(-2, -3).flatten(-2))  # type: ignore[operator]
        return merged if self.starting else merged.transpose(-2, -3)


def projection(module: Any) -> Any:
    """The layer that makes the bias: `linear`, or `linear_z` in OpenFold 3."""
    return module.linear if hasattr(module, "linear") else module.linear_z


def triangle_call(
    module: Any, x: Tensor, mask: Tensor | None, *, turned: bool = False
) -> tuple[Tensor, PairCall]:
    """The normed pair representation as its rows attend, and what they attend with.

    Args:
        module: a triangle attention, patched or not.
        x: pair representation, shape (*, I, J, C).
        mask: ones and zeros, shape (*, I, J), or None.
        turned: whether the bias of token j and k is that of pair (k, j): OpenFold 3 turns the
            representation before it calls the ending node.
    """
    source, seen = x, None if mask is None else mask == 1
    if not module.starting:
        x = x.transpose(-2, -3)
        seen = None if seen is None else seen.transpose(-1, -2)
    x = module.layer_norm(x)
    # somebody sees a token that counts; in the outer product of a mask all others are hidden
    tokens = None if seen is None else seen.any(-2)
    q, k, v = module.mha._prep_qkv(x, x)  # (*, I, H, J, D), q scaled
    pairs = x.transpose(-2, -3) if turned else x
    call = PairCall(
        q, k, v, source,
        # (*, 1, H, J, K)
        bias=lambda: projected_pairs(module, pairs, projection(module)).unsqueeze(-4),
        features=lambda: pair_features(pairs, mask=tokens).unsqueeze(-3),
        key_mask=seen,
        tokens=None if tokens is None else tokens.unsqueeze(-2),
    )  # fmt: skip
    return x, call


def observe(module: Any, x: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Observed:
    """What a call says about the bias, see `Recipe.observe`."""
    return triangle_call(module, x, mask)[1].observed()


def describe(site: Site) -> Description:
    """A dense term, made in each call."""
    module: Any = site.module
    # queries, keys and values are made of the pairs behind their norm, too
    pairs = Pairs(projection(module).weight.shape[1], "linear", rows=None)
    return described(module.no_heads, site.tokens, module.c_hidden, pairs)

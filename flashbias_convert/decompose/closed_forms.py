"""Biases that are known as formulas: ALiBi slopes and spatial distance (FlashBias, section 3.2)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError
from ..terms import KeyBias, LowRank, ScoreBias, Term

SlopeConvention = Literal["bloom", "mpt", "geometric"]


def alibi_slopes(
    heads: int, convention: SlopeConvention = "bloom", *, bias_max: float = 8.0
) -> Tensor:
    """Slopes of ALiBi for any number of heads; all conventions agree on powers of two.

    Read the slopes off a model's own bias where it has one: this is for models that compute them.

    Args:
        heads: number of heads, H.
        convention: "bloom" (Press et al., BLOOM, Falcon): the slopes of the next smaller power of
            two, then every other slope of the next larger one. "mpt": every other slope of the
            next larger power of two, odd ones first. "geometric": one row 2**(-bias_max i / H).
        bias_max: minus the exponent of the last slope.

    Returns:
        fp32, shape (H,), positive.
    """
    if heads < 1:
        raise UsageError(f"heads must be at least 1, got {heads}")
    if convention not in get_args(SlopeConvention):
        raise UsageError(f"unknown convention {convention!r}; known are bloom, mpt and geometric")
    if convention == "geometric" or heads & (heads - 1) == 0:
        return _geometric(heads, bias_max)
    larger = 2 ** math.ceil(math.log2(heads))
    fine = _geometric(larger, bias_max)
    if convention == "mpt":
        return torch.cat([fine[1::2], fine[::2]])[:heads]
    coarse = _geometric(larger // 2, bias_max)
    return torch.cat([coarse, fine[::2]])[:heads]


def _geometric(heads: int, bias_max: float) -> Tensor:
    steps = torch.arange(1, heads + 1, dtype=torch.float64)
    return torch.exp2(-bias_max * steps / heads).float()


def spatial_distance(
    queries: Tensor, keys: Tensor | None = None, *, weight: Tensor | float = 1.0, heads: int = 1
) -> ScoreBias:
    """Minus a weight times the squared distance of two points, up to a constant per row.

    -w_i |x_i - y_j|^2 = w_i (2 x_i . y_j - |y_j|^2) - w_i |x_i|^2, and softmax ignores the last
    term: rank d and a key term with one weight for all queries, rank d + 1 with a weight per query
    (FlashBias, Example 3.5, has d + 2). Points are centred first, which changes no distance and
    keeps the factors small: in fp32 the cancellation of far-off coordinates would cost digits.

    Args:
        queries: floating point, shape (*batch, N, d).
        keys: shape (*batch, M, d); default the queries.
        weight: a number, or a tensor (*batch, H or 1, N), one weight per query.
        heads: H, the number of heads that share the points.

    Returns:
        Exact terms for H heads, fp32.
    """
    keys = queries if keys is None else keys
    if queries.shape[-1] != keys.shape[-1]:
        raise UsageError(
            f"queries and keys must have the same dimension, got {queries.shape[-1]} and "
            f"{keys.shape[-1]}"
        )
    centre = keys.double().mean(-2, keepdim=True)
    x, y = (queries.double() - centre)[..., None, :, :], (keys.double() - centre)[..., None, :, :]
    squares = y.square().sum(-1)
    if isinstance(weight, Tensor):
        gate = weight.double()[..., None]
        ones = torch.ones_like(gate).expand(*torch.broadcast_shapes(gate.shape, x[..., :1].shape))
        phi_q = torch.cat([(2 * gate * x), -gate * ones], -1)
        phi_k = torch.cat([y, squares[..., None]], -1)
        return ScoreBias((LowRank(phi_q=phi_q.float(), phi_k=phi_k.float()),), heads)
    terms: tuple[Term, ...] = (
        LowRank(phi_q=(2 * weight * x).float(), phi_k=y.float()),
        KeyBias(values=(-weight * squares).float()),
    )
    return ScoreBias(terms, heads)

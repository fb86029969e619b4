"""Weighted squared distances of points."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..terms import LowRank, ScoreBias
from .base import LearnableBias, require_positive


class SpatialDistanceBias(LearnableBias):
    """Minus a weight times the squared distance of two points: ``-w[h, i] |x_i - y_j|^2``.

    Where neither weights nor points have a gradient, what all keys of a query have in common is
    left out, ``-w[h, i] |x_i|^2`` after centring: softmax ignores it, and four columns are exact
    for points in space. Source: FlashBias, Example 3.5 and section 4.4 (a learnable weight for
    every token).

    The weight of a head is the exponential of a parameter, so that it stays positive; heads start
    with a geometric series, from about the whole set of points to a small part of it.

    Args:
        heads: number of query heads, H.
        tokens: N, for a parameter of its own for every token of a fixed set of points; None for
            one for each head. Weights that a network makes go into the call instead.
        learnable: weights are parameters; else a buffer that is saved with the model.
        widest, narrowest: first and last weight of the series, per unit of squared distance.

    Raises:
        UsageError: sizes or weights that are not positive.
    """

    log_weight: Tensor

    def __init__(
        self,
        heads: int,
        *,
        tokens: int | None = None,
        learnable: bool = True,
        widest: float = 1.0,
        narrowest: float = 64.0,
    ) -> None:
        super().__init__(heads)
        if tokens is not None:
            require_positive("tokens", tokens)
        if not (0 < widest < math.inf and 0 < narrowest < math.inf):
            raise UsageError(f"weights must be positive, got {widest} and {narrowest}")
        series = torch.linspace(math.log(widest), math.log(narrowest), heads)
        start = series[:, None].repeat(1, tokens or 1)
        if learnable:
            self.log_weight = nn.Parameter(start)
        else:
            self.register_buffer("log_weight", start)

    def forward(
        self, queries: Tensor, keys: Tensor | None = None, *, weight: Tensor | None = None
    ) -> ScoreBias:
        """Terms for these points.

        Args:
            queries: fp32 or fp64, shape (*batch, N, d).
            keys: shape (*batch, M, d); default the queries.
            weight: multiplies the weights of the module, shape (*batch, H or 1, N or 1).

        Raises:
            TypeError: points in half precision, which rounds coordinates before they are centred.
            UsageError: points of different dimensions.
        """
        gate = self.log_weight.exp()
        if weight is not None:
            gate = gate * weight.to(gate.dtype)
        asks = [gate, queries, *([] if keys is None else [keys])]
        phi_q, phi_k = distance_factors(queries, keys, whole=any(x.requires_grad for x in asks))
        return ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k, row_scale=gate),), self.heads)

    def extra_repr(self) -> str:
        learnable = isinstance(self.log_weight, nn.Parameter)
        return f"heads={self.heads}, tokens={self.log_weight.shape[-1]}, learnable={learnable}"


def distance_factors(
    queries: Tensor, keys: Tensor | None = None, *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Factors of ``-|x_i - y_j|^2``, by default up to a constant per row that softmax ignores.

    -|x - y|^2 = 2 x . y - |y|^2 - |x|^2, of which the last part is left out, or with `whole` a
    column of its own. Points are centred in fp64: this changes no distance, and far-off coordinates
    would cancel in fp32.

    Gradients of weights and of points want the whole: in half precision gradients of scores do not
    add up to zero along a row, and what is left over is multiplied with the distances of points
    that see each other, or without the last part with numbers of the size of the whole set.

    Args:
        queries: fp32 or fp64, shape (*batch, N, d).
        keys: shape (*batch, M, d); default the queries.
        whole: leave nothing out.

    Returns:
        phi_q (*batch, 1, N, R) and phi_k (*batch, 1, M, R) in the dtype of the points, with R of
        d + 1, or d + 2 for the whole. A weight for every query is the `row_scale` of the term.

    Raises:
        TypeError, UsageError: see `SpatialDistanceBias`.
    """
    keys = queries if keys is None else keys
    for name, points in (("queries", queries), ("keys", keys)):
        if points.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be fp32 or fp64 coordinates, got {points.dtype}")
    if queries.shape[-1] != keys.shape[-1]:
        raise UsageError(
            f"queries and keys must have the same dimension, got {queries.shape[-1]} and "
            f"{keys.shape[-1]}"
        )
    centre = keys.double().mean(-2, keepdim=True)
    x, y = queries.double() - centre, keys.double() - centre
    own, other = (z.square().sum(-1, keepdim=True) for z in (x, y))
    of_queries, of_keys = [2 * x, -torch.ones_like(own)], [y, other]
    if whole:
        of_queries.append(-own)
        of_keys.append(torch.ones_like(other))
    phi_q, phi_k = torch.cat(of_queries, -1), torch.cat(of_keys, -1)
    return phi_q.to(queries.dtype).unsqueeze(-3), phi_k.to(keys.dtype).unsqueeze(-3)

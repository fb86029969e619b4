"""The reference: attention with a dense bias, written as the formula reads.

It defines what every other backend must compute. float64 inputs are computed in float64, all
others in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..terms import LowRank, ScoreBias
from .arguments import AttentionArguments
from .positions import place_queries, spread_diagonals


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: ScoreBias | None,
    args: AttentionArguments,
    score_scale: LowRank | None = None,
) -> Tensor:
    """softmax(scale * q k^T * b + bias, masked) v, see `flashbias_attention` for shapes."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[-3] // k.shape[-3]
    key = _repeat_heads(k.to(dtype), groups)
    value = _repeat_heads(v.to(dtype), groups)
    query = q.to(dtype)
    if args.cosine:
        query, key = normalize_rows(query), normalize_rows(key)
    scores = (query @ key.transpose(-1, -2)) * args.scale_for_heads(q, dtype)
    if score_scale is not None:
        scores = scores * score_scale.dense(q.shape[-2], k.shape[-2], dtype=dtype)
    if bias is not None and bias.terms:  # without terms it has no device either
        scores = scores + dense_bias(bias, q.shape[-2], k.shape[-2], args, dtype)
    visible = visible_keys(q, k, args)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    # a row without any visible key attends to nothing: zeros, as in torch's fused attention
    nothing = scores.amax(-1, keepdim=True) == float("-inf")
    # filled before the softmax, too: its gradient for a row of -inf would be NaN
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (weights @ value).to(q.dtype)


def normalize_rows(x: Tensor) -> Tensor:
    """Rows scaled to unit length; zero rows stay zero. Shape (..., D)."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def dense_bias(
    bias: ScoreBias, n: int, m: int, args: AttentionArguments, dtype: torch.dtype
) -> Tensor:
    """The bias as a matrix, shape (*batch, H, n, m), for either kind of query_start."""
    start = args.query_start
    if not isinstance(start, Tensor):
        return bias.dense(n, m, query_start=start, dtype=dtype)
    placed = spread_diagonals(place_queries(bias, n, start), n, m, start)
    return placed.dense(n, m, query_start=0, dtype=dtype)


def visible_keys(q: Tensor, k: Tensor, args: AttentionArguments) -> Tensor | None:
    """Boolean (*batch, H or 1, N or 1, M), True where a query may attend; None if everywhere."""
    visible = None
    if args.key_mask is not None:
        visible = args.key_mask[..., None, None, :]
    if args.causal:
        rows = torch.arange(q.shape[-2], device=q.device)
        start = args.query_start
        if isinstance(start, Tensor):
            start = start.to(q.device)[..., None, None, None]
        last = start + rows[:, None]
        past = torch.arange(k.shape[-2], device=q.device) <= last
        visible = past if visible is None else visible & past
    return visible


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=-3)

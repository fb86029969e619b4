"""A factor on every score, of low rank: softmax(scale * (q k^T) * b + bias) v.

With b = phi_q phi_k^T, a score times its factor is a product of longer rows: (q_i . k_j) b_ij is
[phi_q[i, 1] q_i, ..., phi_q[i, R] q_i] . [phi_k[j, 1] k_j, ..., phi_k[j, R] k_j]. So every backend
computes it as plain attention with head size R D (FlashBias, appendix "Extension to Multiplicative
Bias").
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..errors import UsageError
from ..terms import LowRank, ScoreBias
from .arguments import AttentionArguments
from .backends import MAX_HEAD_SIZE
from .eager import normalize_rows
from .factors import balance, effective_factors
from .prepared import PreparedBias

#: bytes of fast memory of a multiprocessor, as the paper's example has them
SHARED_MEMORY = 100 * 1024


def largest_rank(head_size: int) -> int:
    """The largest rank that pays: 4 for D = 64, 8 for D = 32, 16 for D = 16.

    As measured (`scripts/bench_score_scale.py`, H200, 4,096 tokens): rows of R D = 256 numbers, the
    longest that the kernels take, need 0.4 to 0.5 ms forward, where making the matrix of factors
    and multiplying the scores by it needs 1.0, and 2.5 to 3.4 ms with gradients, beside 2.7 to 2.9;
    longer rows 1.4 and 16, on torch's attention.

    It moves no more memory than a dense matrix of factors would, either, R <= sqrt(S / C^2 + 1),
    with the head size C and S = 100 KB (FlashBias, the corollary on efficiency in that appendix): 5
    for C = 64, 10 for C = 32, 20 for C = 16. The paper's own example says 27 for C = 64, which its
    formula does not give.
    """
    bound = math.isqrt(SHARED_MEMORY // head_size**2 + 1)
    return min(bound, max(MAX_HEAD_SIZE // head_size, 1))


def check_score_scale(score_scale: object, q: Tensor, k: Tensor, *, backend: str) -> LowRank:
    """The factors, if a call can use them. Reads shapes only.

    Raises:
        TypeError: no `LowRank`.
        UsageError: factors for some heads only, or above `largest_rank` unless it is "eager".
        ValueError: rank 0, or sizes that do not fit those of q and k.
    """
    if not isinstance(score_scale, LowRank):
        raise TypeError(f"score_scale must be a LowRank term, got {type(score_scale).__name__}")
    if score_scale.heads is not None:
        raise UsageError(
            "score_scale must cover all heads", "give the others factors of one: rank 1"
        )
    bound = PreparedBias(ScoreBias((score_scale,), q.shape[-3]), once=True)
    bound.check_fits(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2])
    rank, most = max(score_scale.head_ranks()), largest_rank(q.shape[-1])
    if rank == 0:
        raise ValueError("score_scale has rank 0: it would make every score zero")
    if rank > most and backend != "eager":
        raise UsageError(
            f"score_scale of rank {rank} does not pay with head size {q.shape[-1]}, at most {most} "
            "does",
            "backend='eager' multiplies the matrix of scores, whatever the rank",
        )
    return score_scale


def repeat_channels(
    q: Tensor, k: Tensor, v: Tensor, score_scale: LowRank, args: AttentionArguments
) -> tuple[Tensor, Tensor, Tensor, AttentionArguments]:
    """q, k, v and arguments of the plain attention that computes the same. Differentiable.

    Args:
        q, k, v: shapes (*batch, H, N, D), (*batch, Hkv, M, D), (*batch, Hkv, M, Dv).
        score_scale: from `check_score_scale`.
        args: of the call; `scale` is a number or has an entry per head.

    Returns:
        q (*batch, H, N, R D) and k (*batch, H or Hkv, M, R D) in their dtypes, rounded once, v with
        the heads of k, and arguments in which rows are normalised already.
    """
    rank = max(score_scale.head_ranks())
    wide = torch.promote_types(q.dtype, torch.float32)
    query, key = q.to(wide), k.to(wide)
    if args.cosine:
        query, key = normalize_rows(query), normalize_rows(key)
    phi_q, phi_k = (phi[..., :rank] for phi in effective_factors(score_scale))
    phi_q, phi_k = balance(phi_q.to(wide), phi_k.to(wide))
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1 and phi_k.shape[-3] > 1:  # keys of one group, and factors of every head
        key, v = (x.repeat_interleave(groups, dim=-3) for x in (key, v))
    query, key = _multiplied(query, phi_q), _multiplied(key, phi_k)
    return query.to(q.dtype), key.to(k.dtype), v, dataclasses.replace(args, cosine=False)


def _multiplied(rows: Tensor, phi: Tensor) -> Tensor:
    """(..., N, D) and (..., N, R) -> (..., N, R D)."""
    return (phi[..., :, None] * rows[..., None, :]).flatten(-2)

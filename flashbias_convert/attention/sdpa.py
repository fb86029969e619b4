"""Attention with factors concatenated to q and k, on torch's fused attention.

softmax(s q k^T + phi_q phi_k^T) v = softmax(s [q, phi_q / s] [k, phi_k]^T) v  (FlashBias, eq. 4).
Everything else than low rank becomes a dense mask. Differentiable.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..terms import KeyBias, LowRank, ScoreBias, Term
from .arguments import AttentionArguments
from .eager import dense_bias, normalize_rows, visible_keys
from .factors import balance, effective_factors, split_columns
from .second_derivative import differentiates_twice, refuse_second_derivatives

#: Most columns of q and its factors together that torch's fused kernels take.
MAX_COLUMNS = 256
#: A key bias so far below the largest of its row hides a key, and fp16 still holds it.
LOWEST_KEY_BIAS = -(2.0**15)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, args: AttentionArguments
) -> Tensor:
    """Attention on `torch.nn.functional.scaled_dot_product_attention`.

    Shapes as in `flashbias_attention`.
    """
    if q.numel() == 0:  # torch's fused kernels refuse some empty shapes
        return _nothing(q, k, v, bias, args)
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and q.device.type == "cpu" and _learns_a_gate(bias):
        return sdpa_attention(q.float(), k.float(), v.float(), bias, args).to(q.dtype)
    groups = q.shape[-3] // k.shape[-3]
    query, key, scale = scaled(q, k, args)
    key, value = _repeat(key, groups), _repeat(v, groups)
    thin, rest = _split_terms(bias, q)
    for term in thin:
        phi_q, phi_k = _columns(term, query, key, scale, q.shape[-3])
        query, key = torch.cat([query, phi_q], -1), torch.cat([key, phi_k], -1)
    # torch aligns its causal mask at the top left; only there can it be left to the kernel
    plain = rest is None and args.key_mask is None
    is_causal = plain and args.causal and _is_zero(args.query_start)
    visible = None if is_causal else visible_keys(q, k, args)
    mask, nothing = additive_mask(q, k, rest, visible, args)
    out = _fused(query, key, value, mask, is_causal, scale)
    # backends differ on rows in which every key is masked; the promise is zeros
    out = out if nothing is None else out.masked_fill(nothing, 0.0)
    for term in thin:
        if half and isinstance(term, KeyBias):
            none = (term.values == float("-inf")).all(-1, keepdim=True)[..., None]
            out = out.masked_fill(_expand(none.to(out.dtype), out, term, out.shape[-3]) > 0, 0.0)
    return out


def _learns_a_gate(bias: ScoreBias | None) -> bool:
    """Whether gradients of a gate on factors are wanted.

    It is a sum over columns that may cancel, as those of distances do, and torch rounds the
    gradient of each column to the dtype of q before.
    """
    return torch.is_grad_enabled() and any(
        isinstance(t, LowRank) and t.row_scale is not None and t.row_scale.requires_grad
        for t in (() if bias is None else bias.terms)
    )


def scaled(q: Tensor, k: Tensor, args: AttentionArguments) -> tuple[Tensor, Tensor, float]:
    """q and k, and the scale that is left to torch's kernels, which take positive ones only.

    In half precision a scale is better applied to fp32 products than to q; in fp32 it is better
    applied to q than divided out of a large bias.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and not args.cosine and not isinstance(args.scale, Tensor) and args.scale != 0:
        return (q if args.scale > 0 else -q), k, abs(float(args.scale))
    wide = torch.promote_types(q.dtype, torch.float32)
    query, key = q.to(wide), k.to(wide)
    if args.cosine:
        query, key = normalize_rows(query), normalize_rows(key)
    return (query * args.scale_for_heads(q, wide)).to(q.dtype), key.to(k.dtype), 1.0


def columns_alone(q: Tensor, bias: ScoreBias | None, args: AttentionArguments) -> int | None:
    """How many columns carry the whole bias; None where a mask of size N x M is needed."""
    thin, rest = _split_terms(bias, q)
    if rest is not None or args.key_mask is not None:
        return None
    if args.causal and not _is_zero(args.query_start):
        return None
    return sum(_width(term, q) for term in thin)


def _split_terms(bias: ScoreBias | None, q: Tensor) -> tuple[list[Term], ScoreBias | None]:
    """The terms that become columns, and the bias that becomes a mask."""
    if bias is None:
        return [], None
    thin: list[Term] = []
    columns = q.shape[-1]
    for term in bias.terms:
        width = _width(term, q)
        if width and columns + width <= MAX_COLUMNS:
            thin.append(term)
            columns += width
    rest = tuple(t for t in bias.terms if t not in thin)
    return thin, ScoreBias(rest, bias.num_heads) if rest else None


def _width(term: Term, q: Tensor) -> int:
    """How many columns a term needs; 0 if it goes into the mask."""
    dtype = q.dtype
    if dtype == torch.float32 and q.device.type == "cuda":
        # torch's fp32 attention multiplies in three TF32 products: good enough for scores, but a
        # bias of 10 and more would be less exact than one that is added
        return 0
    if isinstance(term, KeyBias) and term.row_scale is None:
        return 1 + 2 * _splits(1, None, dtype)
    if isinstance(term, LowRank):
        return term.max_rank + 2 * _splits(term.max_rank, term.split, dtype)
    return 0


def _splits(rank: int, split: int | None, dtype: torch.dtype) -> int:
    """Columns to split: `split` was chosen for fp16; bf16 is eight times coarser."""
    if dtype == torch.bfloat16:
        return rank
    if dtype == torch.float16:
        return rank if split is None else min(split, rank)
    return 0


def _columns(
    term: Term, query: Tensor, key: Tensor, scale: float, heads: int
) -> tuple[Tensor, Tensor]:
    """Columns to append to q (*batch, H, N, D) and k (*batch, H, M, D), in their dtype."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if isinstance(term, LowRank):
        # a gate is multiplied in the precision of the call
        phi_q, phi_k = effective_factors(term.map_tensors(lambda _, t: t.to(wide)))
        split = term.split
    else:
        assert isinstance(term, KeyBias)
        phi_k, split = _finite(term.values.to(wide), query.dtype)[..., None], None
        phi_q = torch.ones_like(phi_k[..., :1, :])
    phi_q, phi_k = balance(phi_q.to(wide) / scale, phi_k.to(wide))
    splits = _splits(phi_q.shape[-1], split, query.dtype)
    phi_q, phi_k = split_columns(phi_q, phi_k, splits, query.dtype)
    return _expand(phi_q, query, term, heads), _expand(phi_k, key, term, heads)


def _finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A key bias (..., M) that half precision holds, up to a constant, which softmax ignores."""
    if dtype not in (torch.float16, torch.bfloat16):
        return values
    top = values.detach().amax(-1, keepdim=True)
    top = top.where(top > float("-inf"), 0.0)
    return (values - top).clamp(min=LOWEST_KEY_BIAS)


def _expand(phi: Tensor, like: Tensor, term: Term, heads: int) -> Tensor:
    """Columns (*batch, H', N, R) of some heads, as (*batch, H, N, R) of all."""
    if term.heads is not None:
        where = torch.tensor(term.heads, device=phi.device)
        own = phi.expand(*phi.shape[:-3], len(term.heads), *phi.shape[-2:])
        zeros = phi.new_zeros(*phi.shape[:-3], heads, *phi.shape[-2:])
        phi = zeros.index_copy(phi.dim() - 3, where, own)
    return phi.expand(*like.shape[:-1], phi.shape[-1])


def additive_mask(
    q: Tensor,
    k: Tensor,
    rest: ScoreBias | None,
    visible: Tensor | None,
    args: AttentionArguments,
) -> tuple[Tensor | None, Tensor | None]:
    """A boolean or additive mask in the dtype of q, and which rows see nothing; None if none."""
    if rest is None:
        return visible, None if visible is None else ~visible.any(-1, keepdim=True)
    wide = torch.promote_types(q.dtype, torch.float32)
    mask = dense_bias(rest, q.shape[-2], k.shape[-2], args, wide)
    if visible is not None:
        mask = mask.masked_fill(~visible, float("-inf"))
    top = mask.detach().amax(-1, keepdim=True)
    nothing = top == float("-inf")
    if q.dtype in (torch.float16, torch.bfloat16):
        # softmax ignores a constant per row, and without it the mask rounds less
        mask = mask - top.masked_fill(nothing, 0.0)
    return mask.to(q.dtype), nothing


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """SDPA on (batch, H, N, C), padded so that its fused kernels accept the sizes."""
    batch, dv = q.shape[:-3], v.shape[-1]
    width = -(-max(q.shape[-1], dv) // 8) * 8
    padded = [F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v)]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in padded)
    mask = _flatten_mask(mask, batch)
    if (
        mask is not None
        and mask.requires_grad
        and not any(x.requires_grad for x in (query, key, value))
    ):
        query = _follow(query, mask)
    with _under_transforms(mask):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )
    refuse_second_derivatives(out, (query, key, value, mask))
    return out[..., :dv].reshape(*batch, *out.shape[-3:-1], dv)


def _under_transforms(mask: Tensor | None) -> AbstractContextManager[Any]:
    """Plain products where torch's fused kernels lack what a transform of torch.func needs.

    That for CUDA refuses a mask that vmap's other entries share, and none has second derivatives,
    nor forward ones.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return nullcontext()
    if mask is None and not differentiates_twice():
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _follow(query: Tensor, mask: Tensor) -> Tensor:
    """The same query, as one that depends on the mask.

    torch's memory-efficient kernel keeps what its backward pass needs only if q, k or v ask for a
    gradient, and fails where the mask alone does.
    """
    one = mask[..., :1, :1]
    return query + torch.where(torch.zeros_like(one, dtype=torch.bool), one, 0.0)


def _flatten_mask(mask: Tensor | None, batch: tuple[int, ...]) -> Tensor | None:
    """The mask as (batch or 1, H, N, M); a mask without batch dimensions is not copied."""
    if mask is None:
        return None
    # a size that torch.export leaves open is no int: asking for its value would settle it
    if not all(isinstance(size, int) and size == 1 for size in mask.shape[:-3]):
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.reshape(-1, *mask.shape[-3:])


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=-3)


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, args: AttentionArguments
) -> Tensor:
    """The empty output of an empty q, (*batch, H, N, Dv), of which all gradients are zero."""
    terms = () if bias is None else bias.terms
    inputs = [q, k, v, *(tensor for term in terms for tensor in term.tensors().values())]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for tensor in (*inputs, args.scale):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            out = out + tensor.sum().to(out.dtype)
    return out


def _is_zero(start: int | Tensor) -> bool:
    if isinstance(start, Tensor):
        return False
    # a branch, because a symbolic size compares to a symbolic boolean
    return True if start == 0 else False  # noqa: SIM210

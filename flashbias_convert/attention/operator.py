"""The public function: attention with a score bias."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..errors import UnsupportedTermError, UsageError
from ..terms import LowRank, ScoreBias
from .arguments import AttentionArguments, check_arguments
from .autograd import attention_training_op
from .backends import (
    BACKENDS,
    call_problem,
    device_problem,
    training_way,
    wants_gradients,
    warn_once,
)
from .bounds import LARGEST_BOUND
from .eager import eager_attention
from .factors import COSINE_UNIT
from .flags import flags_of
from .multiplicative import check_score_scale, repeat_channels
from .packing import NO_BIAS
from .precision import without_autocast
from .prepared import PreparedBias
from .registration import attention_op
from .sdpa import sdpa_attention
from .traced_bias import TracedBias


def _as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Different dtypes under autocast, which layers outside of it leave: as torch's attention."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v  # `check_arguments` refuses them
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def flashbias_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: ScoreBias | PreparedBias | TracedBias | None = None,
    *,
    scale: float | Tensor | None = None,
    causal: bool = False,
    query_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    cosine: bool = False,
    score_bound: float | None = None,
    score_scale: LowRank | None = None,
    gate: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """softmax(scale * q k^T + bias) v, the bias being a sum of terms (FlashBias, section 3).

    Scores, softmax and accumulation are fp32 (fp64 for fp64 inputs). A row in which every key is
    masked gives zeros. Under autocast q, k and v of different dtypes are cast to its own.

    Args:
        q: shape (*batch, H, N, D); fp16, bf16, fp32 or fp64; any strides.
        k: shape (*batch, Hkv, M, D), where Hkv divides H (grouped-query heads).
        v: shape (*batch, Hkv, M, Dv).
        bias: terms for H heads. Their batch dimensions broadcast, right-aligned, to those of q.
            A `PreparedBias` keeps what the kernel needs between calls.
        scale: multiplies q k^T, but not the bias: a number (0 is a number), or a tensor with one
            entry per head. Default D ** -0.5, or 1 with `cosine`.
        causal: query i attends to keys 0 ... query_start + i.
        query_start: position of the first query among the keys, for causal masks and ALiBi: an
            int, or integers of shape (*batch). Default M - N.
        key_mask: boolean, shape (*batch, M) or broadcastable; True = attend.
        cosine: normalise the rows of q and k in fp32 first (SwinV2). The kernels take scales beyond
            22,700 for that in half precision.
        score_bound: what no |scale * q k + bias| exceeds, masks aside, if the caller knows: a hint
            that lets the kernel skip the running maximum. Without a `key_mask`, every row must
            have a key that is not masked by a term. A bound that is wrong makes wrong results.
        score_scale: multiplies the scores before the bias is added, softmax(scale * (q k^T) * b +
            bias) v with b = phi_q phi_k^T, as plain attention with head size R D. For instance
            cos(i - j), of rank 2: phi_q[i] = (cos i, sin i), phi_k[j] = (cos j, sin j). Where R D
            is more than 256 (rank 4 for D = 64), or b as a matrix would move less memory, it does
            not pay and is refused (FlashBias, appendix "Extension to Multiplicative Bias").
        gate: multiplies the output by its sigmoid, as AlphaFold does; shape (*batch, H, N, Dv) or
            broadcastable, any strides. The inference kernel does so before it rounds and writes.
        backend: "triton" (the kernels, forward and backward), "sdpa" (factors concatenated on
            torch's attention, differentiable), "eager" (the reference), or "auto": the kernels
            where they can run, else sdpa with a warning once per reason.
        deterministic: the backward pass of the kernels gives the same bits every time. False lets
            it add gradients of q and of phi_q with atomics, in an order that changes from call to
            call, which saves it from computing the scores twice. "auto" then takes whatever was
            measured to be fastest on such a card: atomics or not, or torch's attention, where
            factors or a key bias are all that is added; of other terms nothing was measured, and
            it takes none ("triton" does). No atomics, whatever is said here: where a gradient is
            asked for of a row scale (but one of factors, or an ALiBi slope), a diagonal or axial
            terms; and under torch.use_deterministic_algorithms(True).

    Returns:
        Tensor of shape (*batch, H, N, Dv) in the dtype of q.

    Raises:
        ValueError, TypeError: arguments that do not fit; the message names them.
        UsageError: an unknown backend, or a `score_scale` whose rank does not pay; only
            `backend="eager"` takes any rank.
        UnsupportedTermError: `backend="triton"` was asked for something that it cannot do.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if not isinstance(bias, ScoreBias | PreparedBias | TracedBias | None):
        raise TypeError(
            f"bias must be a ScoreBias or None, got {type(bias).__name__}; one term becomes a "
            "bias with ScoreBias((term,), num_heads)"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        q, k, v = _as_autocast(q, k, v)
    prepared = PreparedBias(bias, once=True) if isinstance(bias, ScoreBias) else bias
    args = check_arguments(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        query_start=query_start,
        key_mask=key_mask,
        cosine=cosine,
        gate=gate,
    )
    if prepared is not None:
        prepared.check_fits(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2])
    eager = backend == "eager" or (backend == "auto" and q.dtype == torch.float64)
    if score_scale is not None:
        score_scale = check_score_scale(score_scale, q, k, backend="eager" if eager else backend)
        if not eager:
            q, k, v, args = repeat_channels(q, k, v, score_scale, args)
    if eager:
        reference = partial(eager_attention, score_scale=score_scale)
        return gated(without_autocast(q.device, reference, q, k, v, _terms(prepared), args), gate)
    if backend == "sdpa":
        return gated(_by_sdpa(q, k, v, prepared, args), gate)
    training = wants_gradients(q, k, v, prepared, args)
    problem = device_problem(q.device) or call_problem(q, v, prepared)
    if problem is None and training:
        way = training_way(q, k, v, prepared, args, backend=backend, deterministic=deterministic)
        train = partial(training_attention, deterministic=way != "atomics")
        if way == "sdpa":
            return gated(_by_sdpa(q, k, v, prepared, args), gate)
        return gated(without_autocast(q.device, train, q, k, v, prepared, args), gate)
    if problem is None:
        return without_autocast(q.device, triton_attention, q, k, v, prepared, args, score_bound)
    if backend == "triton":
        raise UnsupportedTermError(
            f"the triton backend cannot run this call: {problem}", "use backend='auto'"
        )
    warn_once(problem)
    return gated(_by_sdpa(q, k, v, prepared, args), gate)


def _terms(prepared: PreparedBias | TracedBias | None) -> ScoreBias | None:
    """The terms; asked for where they are needed alone, see `TracedBias`."""
    return None if prepared is None else prepared.bias


def _by_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: PreparedBias | TracedBias | None,
    args: AttentionArguments,
) -> Tensor:
    """By torch's attention, with factors as columns or a mask."""
    return without_autocast(q.device, sdpa_attention, q, k, v, _terms(prepared), args)


def gated(out: Tensor, gate: Tensor | None) -> Tensor:
    """An output times the sigmoid of its gate, in its dtype."""
    return out if gate is None else out * gate.sigmoid().to(out.dtype)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: PreparedBias | TracedBias | None,
    args: AttentionArguments,
    score_bound: float | None = None,
) -> Tensor:
    """Attention by the Triton kernel, whose limits have been checked."""
    start = args.query_start
    number, head_scale = _scales(q, args)
    half = q.dtype != torch.float32
    unit = COSINE_UNIT if args.cosine else number
    # fp32 factors stay as they are: dividing would round them
    packed = NO_BIAS if bias is None else bias.packed(half, unit if half else None)
    bounded = _is_bounded(score_bound, v.dtype, args.key_mask)
    return attention_op(
        q,
        k,
        v,
        packed.tensors,
        packed.spec,
        1.0 if number is None else number,
        head_scale,
        args.key_mask,
        0 if isinstance(start, Tensor) else start,
        start.to(q.device) if isinstance(start, Tensor) else None,
        flags_of(causal=args.causal, cosine=args.cosine, bounded=bounded),
        None if args.gate is None else args.gate.expand(*q.shape[:-1], v.shape[-1]),
    )


def training_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: PreparedBias | TracedBias | None,
    args: AttentionArguments,
    deterministic: bool = True,
) -> Tensor:
    """Attention by the Triton kernels that have a backward pass, whose limits have been checked."""
    start = args.query_start
    number, head_scale = _scales(q, args)
    half = q.dtype != torch.float32
    packed = NO_BIAS if bias is None else bias.packed_for_training(half)
    out, _ = attention_training_op(
        q,
        k,
        v,
        packed.tensors,
        packed.spec,
        1.0 if number is None else number,
        head_scale,
        args.key_mask,
        0 if isinstance(start, Tensor) else start,
        start.to(q.device) if isinstance(start, Tensor) else None,
        flags_of(causal=args.causal, cosine=args.cosine, deterministic=deterministic),
    )
    return out


def _scales(q: Tensor, args: AttentionArguments) -> tuple[float | None, Tensor | None]:
    """The scale as one number, or as fp32 numbers by head on the device of q."""
    if isinstance(args.scale, Tensor):
        return None, args.scale.to(q.device, torch.float32).contiguous()
    return float(args.scale), None


def _is_bounded(score_bound: float | None, dtype: torch.dtype, key_mask: Tensor | None) -> bool:
    """Whether exponentials need no running maximum; fp16 has too few exponents for that."""
    known = score_bound is not None and score_bound <= LARGEST_BOUND
    return known and dtype == torch.bfloat16 and key_mask is None

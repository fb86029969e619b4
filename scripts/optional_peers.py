"""Attention with a bias by packages that may not be installed, for the benchmark scripts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from flashbias_convert.attention.sdpa import scaled
from flashbias_convert.benchmark.calls import AttentionCall
from flashbias_convert.terms import Alibi, Dense

#: what a function of nothing returns is (*batch, H, N, Dv)
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Optional:
    """A peer that is installed.

    Attributes:
        name: as printed.
        make: builds what can be built before the clock runs, and gives the call.
    """

    name: str
    make: Callable[[], Call]


def optional_peers(
    call: AttentionCall, dense: Callable[[AttentionCall], Tensor]
) -> Iterator[Optional]:
    """What is installed and can compute the call; `dense` makes its dense bias."""
    alone = call.bias.terms[0] if len(call.bias.terms) == 1 else None
    if _installed("flash_attn") and isinstance(alone, Alibi):
        yield Optional("flash-attn, alibi", lambda: _flash_attn(call, alone))
    if _installed("xformers"):
        yield Optional("xformers, dense", lambda: _xformers(call, dense(call)))
    shared = isinstance(alone, Dense) and alone.bias.dim() == 3
    plain = not call.args.causal and not call.args.cosine
    if _installed("cuequivariance_torch") and shared and plain and call.q.dim() == 4:
        yield Optional("cuequivariance, dense", lambda: _cuequivariance(call, dense(call)))


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _flash_attn(call: AttentionCall, term: Alibi) -> Call:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    q, k, v = (x.flatten(0, -4).transpose(1, 2) for x in (call.q, call.k, call.v))
    slopes = term.slopes.float()

    def run() -> Tensor:
        out = flash_attn_func(
            q, k, v, softmax_scale=call.args.scale, causal=call.args.causal, alibi_slopes=slopes
        ).transpose(1, 2)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _xformers(call: AttentionCall, mask: Tensor) -> Call:
    """Its memory-efficient attention with a tensor as bias, everything in (batch, N, H, D)."""
    from xformers.ops import memory_efficient_attention  # type: ignore[import-not-found]

    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*call.batch, *mask.shape[-3:])
    flat = mask.reshape(-1, *mask.shape[-3:])
    entries = call.q.shape[:-3].numel()
    bias = flat.expand(entries, *flat.shape[1:])

    def run() -> Tensor:
        query, key, scale = scaled(call.q, call.k, call.args)
        q, k, v = (x.flatten(0, -4).transpose(1, 2) for x in (query, key, call.v))
        out = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale).transpose(1, 2)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _cuequivariance(call: AttentionCall, mask: Tensor) -> Call:
    """Triangle attention: rows (1, N, H, N, D) that share one bias (1, 1, H, N, N)."""
    from cuequivariance_torch import triangle_attention  # type: ignore[import-not-found]

    q, k, v = (x[None] for x in (call.q, call.k, call.v))
    bias = mask.reshape(1, 1, *mask.shape[-3:]).contiguous()
    return lambda: triangle_attention(q, k, v, bias, scale=call.args.scale)[0]

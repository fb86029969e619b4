"""Ways to compute one attention call, ours and everybody else's, for the benchmark scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from attention_shapes import Shape
from given_kernel import GivenKernel
from optional_peers import optional_peers, optional_without_bias
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbias_convert import Alibi, LowRank, RelativeTable, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.benchmark.calls import AttentionCall
from flashbias_convert.benchmark.peers import (
    Flex,
    block_mask,
    dense_mask,
    flex_attention,
    sdpa_attention,
    skips_blocks,
)

#: what a function of nothing returns is (*batch, H, N, Dv)
Call = Callable[[], Tensor]
NO_BIAS = (
    ("flash", SDPBackend.FLASH_ATTENTION),
    ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ("efficient", SDPBackend.EFFICIENT_ATTENTION),
)
#: without CUDA graphs, which would copy inputs and are what calls are timed in anyway
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
DENSE = (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))


class MakeDense(Protocol):
    """Makes the dense bias of a call: `dense_mask`, or what stands in for it."""

    def __call__(self, call: AttentionCall, *, with_causal: bool = True) -> Tensor: ...


@dataclass(frozen=True)
class Peer:
    """One way.

    Attributes:
        name: as printed.
        make: builds what can be built before the clock runs, and gives the call.
        has_bias: whether the result has the bias in it.
    """

    name: str
    make: Callable[[], Call]
    has_bias: bool = True


def peers(shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None,
          kernel: GivenKernel | None = None, dense: MakeDense = dense_mask, tuned: bool = False
          ) -> Iterator[Peer]:  # fmt: skip
    """All peers that can compute a shape; q, k and v are (*batch, H, N, D).

    `dense` makes the dense bias of a call; `tuned`: FlexAttention with max-autotune, too.
    """
    call = _call(shape, q, k, v, bias)
    prepared = None if bias is None else PreparedBias(bias)
    yield Peer("ours", lambda: _ours("triton", shape, q, k, v, prepared))
    yield Peer("ours, sdpa path", lambda: _ours("sdpa", shape, q, k, v, prepared))
    for name, backend in NO_BIAS:
        yield Peer(f"{name}, no bias", lambda b=backend: _sdpa(call, b, None), bias is None)
    for other in optional_without_bias(call):
        yield Peer(other.name, other.make, bias is None)
    if bias is None:
        return
    for name, backend in DENSE:
        yield Peer(f"{name}, dense", lambda b=backend: _sdpa(call, b, dense(call)))
    yield Peer("flex, dense", lambda: _flex_dense(call, dense))
    if tuned:
        yield Peer("flex, dense, tuned", lambda: _flex_dense(call, dense, MAX_AUTOTUNE))
    if len(bias.terms) == 1 and isinstance(bias.terms[0], (Alibi, RelativeTable)):
        yield Peer("flex, closed form", lambda: _flex_closed(call, bias.terms[0]))
    if kernel is not None and not shape.options and len(shape.batch) == 1:
        yield Peer(kernel.name, lambda: _given(kernel, q, k, v, bias))
    for other in optional_peers(call, dense):
        yield Peer(other.name, other.make)


def _call(shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None) -> AttentionCall:
    options: dict[str, Any] = {
        "scale": None, "causal": False, "query_start": None, "key_mask": None, "cosine": False
    }  # fmt: skip
    args = check_arguments(q, k, v, **{**options, **shape.options})
    return AttentionCall(q, k, v, bias or ScoreBias((), q.shape[-3]), args)


def _ours(backend: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Call:
    return lambda: flashbias_attention(q, k, v, bias, backend=backend, **shape.options)


def _sdpa(call: AttentionCall, backend: SDPBackend, mask: Tensor | None) -> Call:
    attend = sdpa_attention(call, mask)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return attend(call.q, call.k, call.v)

    return run


@cache
def _flex(mode: str | None) -> Flex:
    return Flex(mode)


def _flex_dense(call: AttentionCall, dense: MakeDense, mode: str | None = None) -> Call:
    bias = dense(call, with_causal=not skips_blocks(call))  # blocks hide what a mask would
    attend = flex_attention(call, bias, _flex(mode))
    return lambda: attend(call.q, call.k, call.v)


def _flex_closed(call: AttentionCall, term: Alibi | RelativeTable) -> Call:
    """FlexAttention with the formula of the term in its score_mod; nothing is (N, M)."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    blocks = block_mask(call)
    q, k, v = (x.flatten(0, -4) for x in (call.q, call.k, call.v))
    start = call.args.query_start
    scale = call.args.scale

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert isinstance(term, Alibi)
        return score + term.slopes[h] * (j - i - start)

    def table(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert isinstance(term, RelativeTable)
        return score + term.table[h, term.u[i] + term.v[j]]

    def normal(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1) if call.args.cosine else x

    compiled = torch.compile(flex, dynamic=False)
    normal = torch.compile(normal, dynamic=False) if call.args.cosine else normal
    score_mod = alibi if isinstance(term, Alibi) else table

    def run() -> Tensor:
        out = compiled(normal(q), normal(k), v, score_mod, block_mask=blocks, scale=scale)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _given(kernel: GivenKernel, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias) -> Call:
    """A kernel given by the user."""
    (term,) = bias.terms
    if not isinstance(term, LowRank):
        raise ValueError("the kernel adds low-rank biases only")
    batch = q.shape[0]
    phi_q, phi_k = (phi.expand(batch, *phi.shape) for phi in (term.phi_q, term.phi_k))
    factors = kernel.factors(phi_q, phi_k, q.dtype)
    return lambda: kernel.attend(q, k, v, factors)

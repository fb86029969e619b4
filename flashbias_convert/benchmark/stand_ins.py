"""Whole models whose attention is computed by a peer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..modules import ScoreBiasModule
from .calls import AttentionCall, resolve
from .peers import (
    Attention,
    Flex,
    dense_mask,
    flex_attention,
    sdpa_attention,
    skips_blocks,
)


class StandIn:
    """Computes the attention of every site in another way; see `calls.attending`.

    What does not depend on the input of a call is prepared once per site, or once per head where
    each has a call of its own.

    Args:
        prepare: a call -> a function of q, k and v.
    """

    def __init__(self, prepare: Callable[[AttentionCall], Attention]) -> None:
        self._prepare = prepare
        self._known: dict[Hashable, Attention] = {}

    def __call__(
        self, terms: ScoreBiasModule, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        key = (id(terms), kwargs.get("heads"), q.shape, k.shape, v.shape)
        if key in self._known:
            return self._known[key](q, k, v)
        call = resolve(terms, q, k, v, kwargs)
        attend = self._prepare(call)
        from_input = call.args.key_mask is not None or isinstance(call.args.query_start, Tensor)
        if call.is_static and not from_input:
            self._known[key] = attend
        return attend(q, k, v)


def dense_sdpa() -> StandIn:
    """torch's attention with dense biases; sites with the same bias share one."""
    store = _Masks(with_causal=True)
    return StandIn(lambda call: sdpa_attention(call, store.of(call)))


def dense_flex() -> StandIn:
    """FlexAttention, compiled, with dense biases; sites with the same bias share one."""
    run = Flex()
    store = _Masks(with_causal=False)
    return StandIn(lambda call: flex_attention(call, store.of(call), run))


def no_bias() -> StandIn:
    """torch's attention without a bias: what a bias costs at all."""
    return StandIn(lambda call: sdpa_attention(call, None))


@contextlib.contextmanager
def complaining() -> Iterator[None]:
    """Compiling too often is an error: quietly going on without is no fair measurement."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    with config.patch(fail_on_recompile_limit_hit=True):
        yield


class _Masks:
    """Dense masks, one for all sites whose terms are equal."""

    def __init__(self, with_causal: bool) -> None:
        self._with_causal = with_causal
        self._known: list[tuple[AttentionCall, Tensor]] = []

    def of(self, call: AttentionCall) -> Tensor:
        alike = next((mask for other, mask in self._known if _same_mask(call, other)), None)
        if alike is not None:
            return alike
        with_causal = self._with_causal or not skips_blocks(call)
        mask = dense_mask(call, with_causal=with_causal)
        if call.is_static:
            self._known.append((call, mask))
        return mask


def _same_mask(a: AttentionCall, b: AttentionCall) -> bool:
    """Whether two calls add the same matrix to their scores."""
    simple = all(
        x.args.key_mask is None and not isinstance(x.args.query_start, Tensor) for x in (a, b)
    )
    sizes = [(x.q.shape[-2], x.k.shape[-2], x.args.causal, x.args.query_start) for x in (a, b)]
    if not simple or sizes[0] != sizes[1] or a.bias.spec() != b.bias.spec():
        return False
    pairs = zip(a.bias.named_tensors(), b.bias.named_tensors(), strict=True)
    return all(torch.equal(x, y) for (_, x), (_, y) in pairs)

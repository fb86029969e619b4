"""Other ways to compute an attention call: the same bias as a dense matrix, or no bias at all.

Dense biases are made beforehand, causality and masks included, and laid out as the kernels want
them, so that a peer's time is that of its attention alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.arguments import AttentionArguments
from ..attention.eager import dense_bias, normalize_rows, visible_keys
from ..attention.sdpa import additive_mask, scaled
from .calls import AttentionCall

OURS = "converted"
SDPA = "dense bias, SDPA"
SDPA_COMPILED = "dense bias, SDPA compiled"
FLEX = "dense bias, FlexAttention"
NO_BIAS = "no bias, SDPA"
#: the peers that a converted attention must beat
WITH_BIAS = (SDPA, SDPA_COMPILED, FLEX)

#: what a function of q, k and v returns is (*batch, H, N, Dv)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
#: elements that rows of a mask are padded to: without it some kernels copy the mask in every call
_ALIGNED = 16


def dense_mask(call: AttentionCall, *, with_causal: bool = True) -> Tensor:
    """Everything that is added to the scores, (*mask batch, H, N, M), in the dtype of q.

    Args:
        call: with M keys and N queries.
        with_causal: minus infinity where causality hides a key; else 0 there, for somebody who
            hides it otherwise. What is visible is rounded alike.
    """
    visible = visible_keys(call.q, call.k, call.args)
    mask, _ = additive_mask(call.q, call.k, call.bias, visible, call.args)
    assert mask is not None
    if call.args.causal and not with_causal:
        own = visible_keys(call.q, call.k, replace(call.args, key_mask=None))
        assert own is not None
        mask = mask.masked_fill(~own, 0.0)
    m = mask.shape[-1]
    if m % _ALIGNED == 0:
        return mask.contiguous()
    wider = mask.new_zeros((*mask.shape[:-1], -(-m // _ALIGNED) * _ALIGNED))
    wider[..., :m] = mask
    return wider[..., :m]


def sdpa_attention(call: AttentionCall, mask: Tensor | None) -> Attention:
    """torch's attention with an additive mask; without one, causality alone is kept.

    Args:
        call: tells sizes, scale and so on.
        mask: from `dense_mask`, or None.
    """
    args, batch, groups = call.args, call.batch, call.groups
    if mask is not None and any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*batch, *mask.shape[-3:])  # the kernels want one batch dimension
    flat = None if mask is None else mask.reshape(-1, *mask.shape[-3:])
    causal = mask is None and args.causal
    visible = None
    if causal and call.q.shape[-2] != call.k.shape[-2]:  # torch aligns at the top left
        visible, causal = visible_keys(call.q, call.k, replace(args, key_mask=None)), False

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, scale = scaled(q, k, args)
        query, key, value = (_flat(_padded(x)) for x in (query, _per_head(key), _per_head(v)))
        added = visible if flat is None else flat
        out = F.scaled_dot_product_attention(
            query, key, value, added, is_causal=causal, scale=scale
        )
        return out[..., : v.shape[-1]].reshape(*batch, *out.shape[-3:-1], v.shape[-1])

    def _per_head(x: Tensor) -> Tensor:
        return x if groups == 1 else x.repeat_interleave(groups, dim=-3)

    return attend


def flex_attention(call: AttentionCall, bias: Tensor, run: Flex) -> Attention:
    """FlexAttention with a dense bias in its score_mod.

    Args:
        call: tells sizes, scale and so on.
        bias: from `dense_mask`, without causality where `block_mask` takes care of that.
        run: the compiled functions; one serves all calls.
    """
    table: Tensor = bias.reshape(-1, *bias.shape[-3:])
    place = None
    if len(table) > 1:  # which bias belongs to an entry of the batch: nothing is repeated
        own = bias.shape[:-3]
        place = torch.arange(len(table), device=bias.device).reshape(own)
        place = place.expand(call.batch).reshape(-1)
    else:
        table = table[0]
    blocks = block_mask(call)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, scale = run.scaled(q, k, call.args)
        query, key, value = (_flat(x) for x in (query, key, v))
        out = run.attend(query, key, value, table, place, blocks, scale)
        return out.reshape(*call.batch, *out.shape[-3:])

    return attend


class Flex:
    """FlexAttention, compiled: else it would compute the whole matrix of scores.

    Args:
        mode: of torch.compile.
    """

    def __init__(self, mode: str | None = None) -> None:
        self.attend: Any = torch.compile(_flex, dynamic=False, mode=mode)
        self._scaled: Any = torch.compile(scaled, dynamic=False)

    def scaled(
        self, q: Tensor, k: Tensor, args: AttentionArguments
    ) -> tuple[Tensor, Tensor, float]:
        """See `attention.sdpa.scaled`; compiled where it has something to do."""
        found: tuple[Tensor, Tensor, float] = (self._scaled if args.cosine else scaled)(q, k, args)
        return found


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    place: Tensor | None,
    blocks: Any,
    scale: float,
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    def shared_by_all(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, i, j]

    def placed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert place is not None
        return score + table[place[b], h, i, j]

    score_mod = shared_by_all if place is None else placed
    shared = q.shape[1] != k.shape[1]
    return flex(q, k, v, score_mod, block_mask=blocks, scale=scale, enable_gqa=shared)


def block_mask(call: AttentionCall) -> Any:
    """Blocks of keys that causality hides, which FlexAttention skips; None if there are none."""
    start = call.args.query_start
    if not skips_blocks(call):
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + start

    n, m = call.q.shape[-2], call.k.shape[-2]
    return create_block_mask(causal, None, None, n, m, device=call.q.device)


def skips_blocks(call: AttentionCall) -> bool:
    """Whether causality is left to a block mask."""
    return call.args.causal and not isinstance(call.args.query_start, Tensor)


def plain_attention(call: AttentionCall) -> Tensor:
    """The formula, step by step in the dtype of q: what a row may be about as wrong as."""
    q, k = call.q, call.k.repeat_interleave(call.groups, dim=-3)
    v = call.v.repeat_interleave(call.groups, dim=-3)
    if call.args.cosine:
        q, k = normalize_rows(q), normalize_rows(k)
    scores = (q @ k.transpose(-1, -2)) * call.args.scale_for_heads(q, q.dtype)
    added = dense_bias(call.bias, q.shape[-2], k.shape[-2], call.args, q.dtype)
    scores = scores + added
    visible = visible_keys(call.q, call.k, call.args)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def _flat(x: Tensor) -> Tensor:
    """(batch, H, N, D)."""
    return x.reshape(-1, *x.shape[-3:])


def _padded(x: Tensor) -> Tensor:
    """Columns padded to a multiple of 8, as torch's fused kernels want them."""
    rest = -x.shape[-1] % 8
    return F.pad(x, (0, rest)) if rest else x

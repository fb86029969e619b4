"""Attention with padding and a key-value cache: masks of linear size, never dropped.

Language models turn a padding mask (B, M) into one of (B, 1, N, M). Here the padding mask
travels as a *key table* instead: integers (B, 1, 1, M), for each key its place among the tokens of
its row, from 1 on, or 0 for padding. A table of zero keys, (1, 1, 1, 0), says that nothing is
padded. Four dimensions, so that a model takes it for a mask that is ready; integers, so that
nobody takes it for one that is additive or boolean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kept import kept_with
from .modules import ScoreBiasModule
from .tracing import is_traced


def key_table(mask: Tensor | None, device: torch.device) -> Tensor:
    """The key table of a padding mask.

    Args:
        mask: shape (B, M), nonzero = attend; None if nothing is padded.
        device: where the table goes.

    Returns:
        int32, shape (B, 1, 1, M); (1, 1, 1, 0) if nothing is padded. Whether anything is padded
        is read from the mask, which waits for its device; not while a graph is traced, which
        other masks will go through.
    """
    if mask is None or (not is_traced() and bool(mask.all())):
        return torch.zeros(1, 1, 1, 0, dtype=torch.int32, device=device)
    real = (mask != 0).to(device, torch.int32)
    table = real.cumsum(-1, dtype=torch.int32) * real
    return table[:, None, None, :]


def is_key_table(mask: Tensor | None) -> bool:
    """Whether what arrived as a mask is a key table."""
    known = mask is not None and mask.dim() == 4 and mask.dtype == torch.int32
    return known and mask is not None and mask.shape[1:3] == (1, 1)


def check_padding(mask: Tensor | None, batch: int, n: int, cache: Any) -> None:
    """Raise ValueError unless a padding mask covers the cached tokens and those of this call.

    Args:
        mask: shape (B, L), or None.
        batch: B, sequences of the call.
        n: tokens of the call.
        cache: a cache of transformers, or None.
    """
    if mask is None:
        return
    layers = getattr(own_cache(cache), "layers", None)
    fixed = getattr(layers[0], "max_cache_len", None) if layers else None
    start = query_start(cache, 0)
    wanted = start + n if isinstance(start, int) else 0  # where a tensor counts, it is not read
    longest = wanted if fixed is None else fixed
    if mask.shape[0] != batch or not wanted <= mask.shape[-1] <= max(longest, wanted):
        raise ValueError(
            f"the attention mask has shape {tuple(mask.shape)}, but it must cover the cached "
            f"tokens and those of this call: ({batch}, {wanted or fixed})"
        )


def own_cache(cache: Any) -> Any:
    """The cache of self-attention, where decoders keep a second one for cross-attention."""
    return getattr(cache, "self_attention_cache", cache)


def cache_of_call(cache: Any, kwargs: dict[str, Any]) -> Any:
    """The cache of a call, whose argument transformers has given another name.

    Args:
        cache: what came under the name of now, or in its place among the positional arguments.
        kwargs: keyword arguments of the call; the older name is taken out, so that the cache can
            be handed on in its place, which has no name.
    """
    older = kwargs.pop("past_key_values", None)
    return older if cache is None else cache


def query_start(cache: Any, layer: int | None, slots: Tensor | None = None) -> int | Tensor:
    """How many keys a cache of transformers holds before this call adds its own.

    Call it before the cache is updated. A static cache answers with a tensor that it changes in
    place, so a copy is returned.

    Args:
        cache: a cache of transformers, or None.
        layer: whose cache.
        slots: places of the new keys in a cache of fixed length, (N,), if the model has made them
            for all layers: a look at the first spares the card a copy in each layer.
    """
    if cache is None:
        return 0
    start = own_cache(cache).get_seq_length(layer or 0)
    if isinstance(start, Tensor):
        return start.reshape(()).clone() if slots is None else slots[0]
    return int(start)


def attend_causal(
    score_bias: ScoreBiasModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    *,
    start: int | Tensor,
    builder: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    own: Sequence[str] = (),
    built: Mapping[str, dict[str, Any]] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Causal attention with a site's terms and the padding of this call.

    Args:
        score_bias: the terms of the site.
        q: shape (B, H, N, D).
        k, v: shapes (B, Hkv, M, D) and (B, Hkv, M, Dv), everything that the cache holds included;
            the tail of a static cache is hidden by causality.
        keys: the key table, or what is left of one as a boolean.
        start: place of the first query among the keys, an int or a tensor without dimensions.
        builder: makes the bias from the places (B, M) of the keys, 0 for padding, where it follows
            the padding.
        inputs: what else the builder takes.
        own: names of tensors of the site's only term that it takes, too. They are looked up where
            there is padding alone: compiled code checks in every call what it has looked at.
        built: inputs of builders that do not follow the padding, by their names.
        **kwargs: keyword arguments of `flashbias_attention`.

    Returns:
        Tensor of shape (B, H, N, Dv); zeros for queries that have no key to attend to.

    Raises:
        ValueError: the padding mask has fewer keys than the cache holds.
    """
    batch, n, m = q.shape[0], q.shape[-2], k.shape[-2]
    first = start.expand(batch) if isinstance(start, Tensor) else start
    call = {"causal": True, "query_start": first, **kwargs}
    if keys.shape[-1] == 0:
        return score_bias(q, k, v, built=built, **call)
    places = _fit(keys, start, n, m)
    padded = {}
    if builder is not None:
        found = _tensors_of_term(score_bias, own, q.device)
        padded = {builder: {"places": places, **found, **(inputs or {})}}
    out: Tensor = score_bias(
        q, k, v, built={**(built or {}), **padded}, key_mask=_visible(places), **call
    )
    return out


def _tensors_of_term(
    score_bias: ScoreBiasModule, names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Tensors of the only term, by their names; nothing is looked up for none."""
    if not names:
        return {}
    (term,) = score_bias.prepared(device=device).bias.terms
    return {name: getattr(term, name) for name in names}


def attend_padded(
    score_bias: ScoreBiasModule, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, **kwargs: Any
) -> Tensor:
    """Attention in both directions with a site's terms and the padding of this call.

    Args:
        score_bias: the terms of the site.
        q, k, v: shapes (B, H, N, D), (B, H, M, D) and (B, H, M, Dv).
        keys: the key table.
        **kwargs: keyword arguments of `ScoreBiasModule`.

    Returns:
        Tensor of shape (B, H, N, Dv); zeros for rows of the batch that are padding only.

    Raises:
        ValueError: the padding mask is for another number of keys.
    """
    if keys.shape[-1]:
        places = _fit(keys, 0, k.shape[-2], k.shape[-2])
        kwargs["key_mask"] = _visible(places)
    out: Tensor = score_bias(q, k, v, **kwargs)
    return out


def _fit(keys: Tensor, start: int | Tensor, n: int, m: int) -> Tensor:
    """Places (B, M): the mask may end where the unused part of a static cache begins."""
    places = keys[:, 0, 0, :]
    if not torch.compiler.is_compiling():  # one object for all layers of a call
        places = kept_with(keys, "places", places.clone)
    length = places.shape[-1]
    if length > m or (isinstance(start, int) and length < start + n):
        raise ValueError(
            f"the attention mask is for {length} keys, but there are {m}: it must cover the cached "
            "tokens and those of this call"
        )
    if length == m:
        return places
    padded: Tensor = kept_with(places, ("padded", m), lambda: F.pad(places, (0, m - length)))
    return padded


def _visible(places: Tensor) -> Tensor:
    """Which keys are no padding, (B, M): the same for all layers of a call."""
    visible: Tensor = kept_with(places, "visible", lambda: places != 0)
    return visible

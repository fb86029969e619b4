"""Key-value caches of transformers, whose names and signatures differ between its versions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import UsageError

#: What this version of transformers calls the cache in the outputs that `generate` reads.
CACHE_FIELD = next(
    name
    for name in ("cache", "past_key_values")
    if name in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)}
)


def one_of(cache: Any, past_key_values: Any) -> Any:
    """The cache that came under either name; raises UsageError if two came."""
    if cache is not None and past_key_values is not None:
        raise UsageError("cache and past_key_values are two names of one argument, both came")
    return past_key_values if cache is None else cache


def cached_sizes(cache: Any, n: int) -> tuple[int | Tensor, int]:
    """Where `n` new tokens start among the keys, and how many keys there will be.

    Args:
        cache: a cache, or None.
        n: number of new tokens.

    Returns:
        The first new token's position among the keys (an integer tensor without dimensions for a
        cache of fixed length, which may be read inside a compiled forward), and M, the number of
        keys that the cache hands back, those of slots that are not filled yet included.
    """
    if cache is None:
        return 0, n
    start, most = cache.get_seq_length(), fixed_length(cache)
    if isinstance(start, Tensor):
        start = start.clone()  # some caches count on in this very tensor
    return start, start + n if most is None else most


def fixed_length(cache: Any) -> int | None:
    """How many keys a cache of fixed length hands back; None for one that grows."""
    layers = getattr(cache, "layers", None)
    most: int | None = getattr(layers[0], "max_cache_len", None) if layers else None
    return most


def padded_to(attention_mask: Tensor, m: int, *, exact: bool) -> Tensor:
    """Which keys exist: bool (B, m), from a mask over the tokens so far.

    Args:
        attention_mask: shape (B, tokens so far), nonzero = attend.
        m: number of keys.
        exact: whether the tokens so far must be `m`; a cache of fixed length has empty slots.

    Raises:
        UsageError: another shape.
    """
    fits = attention_mask.dim() == 2 and attention_mask.shape[1] <= m
    if not fits or (exact and attention_mask.shape[1] != m):
        raise UsageError(
            f"attention_mask must have shape (B, {m}), one entry for each token so far, "
            f"got {tuple(attention_mask.shape)}"
        )
    return F.pad(attention_mask != 0, (0, m - attention_mask.shape[1]), value=False)


def token_slots(start: int | Tensor, n: int, device: torch.device) -> Tensor:
    """Positions of the new tokens among the keys, int64 (n,)."""
    return torch.arange(n, device=device) + start

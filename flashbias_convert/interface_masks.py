"""Masks for `register_attention`: as small as keeps their meaning.

Four forms go from the mask function through a model to the attention function:

- None: nothing is hidden but, in causal attention of more than one query, the keys after each
  query, both counted from 0: transformers' own meaning for its "sdpa".
- boolean (B, 1, 1, M): these keys are seen, by all queries, and no other is; complete.
- boolean (B, M): padding. Attention that is causal hides later keys besides, the last query being
  at the last key: what flash attention is given, so only models get it that support that.
- (B, 1, N, M): all that is hidden. Boolean, or added to the scores for models that were not
  written for boolean masks, some of whose attention may be their own and add what it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .fallback import say_original
from .kept import kept_with
from .tracing import is_traced

#: what a model takes: sums, booleans of four dimensions, or padding of two as well
Form = Literal["added", "boolean", "padding"]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """A mask function for transformers' `AttentionMaskInterface`.

    Args:
        batch_size, q_length, kv_length: B, N, M.
        q_offset, kv_offset: places of the first query and of the first key.
        mask_function: of indices of sample, head, query and key; default causal.
        attention_mask: padding, (B, at most kv_offset + M), True = attend.
        local_size: a window or chunk, which hides nothing among fewer keys.
        allow_is_causal_skip: nothing but causality, padding and that window is in the mask.
        allow_is_bidirectional_skip: nothing but padding and that window is in the mask.
        config: of the model.
        **kwargs: handed on to transformers' own mask functions.

    Returns:
        One of the forms above.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as ORIGINALS

    form = "boolean" if config is None else form_for(type(config))
    # a window among fewer keys hides none; a chunk, too, if it begins where the keys do
    full = local_size is None or (kv_length < local_size and kv_offset == 0)
    if form != "added" and full and isinstance(kv_offset, int) and not _is_exporting():
        padding = _fit(attention_mask, kv_length, kv_offset)
        if allow_is_bidirectional_skip:
            return None if _hides_nothing(padding) else _as_rows(padding)
        ends_there = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        if allow_is_causal_skip and ends_there:
            if q_length in (1, kv_length) and _hides_nothing(padding):
                return None
            if q_length == 1:
                return _as_rows(padding)
            if form == "padding":
                return _everything(batch_size, kv_length, kwargs) if padding is None else padding
    options = {} if mask_function is None else {"mask_function": mask_function}
    made: Tensor | None = ORIGINALS["eager" if form == "added" else "sdpa"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        config=config,
        **options,
        **kwargs,
    )
    return made


def _is_exporting() -> bool:
    """A graph for other sizes must not be told that this one has none of something."""
    return torch.compiler.is_exporting()


def _everything(batch_size: int, kv_length: int, options: Mapping[str, Any]) -> Tensor:
    shape, device = (batch_size, kv_length), options.get("device")
    return torch.ones(shape, dtype=torch.bool, device=device)


def _fit(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Padding of the keys of this call, (B, M): what is not there yet is hidden."""
    if padding is None:
        return None
    missing = kv_length + kv_offset - padding.shape[-1]
    if missing > 0:
        padding = F.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_length].bool()


def _hides_nothing(padding: Tensor | None) -> bool:
    """Whether all keys are seen; values are not read where a graph is traced."""
    return padding is None or (not is_traced() and bool(padding.all()))


def _as_rows(padding: Tensor | None) -> Tensor | None:
    return None if padding is None else padding[:, None, None, :]


def form_for(config_type: type) -> Form:
    """What models of a kind of configuration take for a mask.

    By what all their classes say that they support. Who supports neither torch's attention nor
    functions of others gets masks that are added: its own attention may know no other.
    """
    return _form_for(config_type)


# torch.compile takes the answer for a constant and does not look inside
form_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _form_for(config_type: type) -> Form:
    classes = list(_classes_of(config_type))
    if not classes:
        return "added"
    if not all(found._can_set_attn_implementation() for found in classes):
        say_original(
            f"{classes[0].__name__} has attention of its own, which no registered function replaces"
        )
        return "added"
    flags = ("_supports_sdpa", "_supports_attention_backend")
    if not all(any(getattr(found, flag, False) for flag in flags) for found in classes):
        return "added"
    padded = all(getattr(found, "_supports_flash_attn", False) for found in classes)
    return "padding" if padded else "boolean"


def _classes_of(config_type: type) -> Iterator[Any]:
    """Loaded classes of models that are made from this kind of configuration."""
    from transformers import PreTrainedModel

    stack: list[Any] = [PreTrainedModel]
    while stack:
        below = stack.pop().__subclasses__()
        stack += below
        yield from (found for found in below if found.config_class is config_type)


def additive(
    mask: Tensor | None, causal: bool, start: int, query: Tensor, key: Tensor
) -> Tensor | None:
    """Any form as numbers that are added, (B or 1, H or 1, N or 1, M), as eager attention takes it.

    Args:
        mask: one of the forms above, or any that broadcasts to (B, H, N, M).
        causal: query i does not see keys after start + i.
        start: the place of the first query.
        query, key: shapes (B, H, N, D) and (B, Hkv, M, D).
    """
    seen = boolean(mask, causal, start, query, key)
    if seen is None or seen.dtype != torch.bool:
        return seen
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(seen.shape, dtype=query.dtype, device=seen.device).masked_fill(~seen, lowest)


def boolean(
    mask: Tensor | None, causal: bool, start: int, query: Tensor, key: Tensor
) -> Tensor | None:
    """As `additive`, but what is boolean stays so, with four dimensions."""
    if mask is not None and mask.dim() == 2:
        mask = mask.bool()[:, None, None, :]
    if not causal:
        return mask
    rows = torch.arange(query.shape[-2], device=query.device)[:, None] + start
    below = (torch.arange(key.shape[-2], device=query.device) <= rows)[None, None]
    return below if mask is None else mask & below


def hidden(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a dense bias, 0 or minus infinity; made once for the layers of a call."""

    def make() -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill(~mask, float("-inf"))

    made: Tensor = kept_with(mask, ("hidden", dtype), make)
    return made

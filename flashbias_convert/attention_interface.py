"""Attention for any model of transformers that lets its attention function be chosen by name.

A model that is set to the name that `register_attention` registers runs on the kernels, with a
`position_bias`, as T5, LayoutLMv3 and others bring it, as a dense term. Recipes (`patch_model`)
replace classes instead and keep such a bias as a table or as factors, of linear size: where a
recipe exists, it is the better way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention import flashbias_attention
from .attention.backends import BACKENDS
from .errors import UnsupportedTermError, UsageError
from .interface_fallback import HandedCall, check_window, eager_reason, run_eager, run_sdpa
from .interface_masks import attention_mask, hidden
from .terms import Dense, ScoreBias

#: substrings by which transformers takes a name for attention of its own, or for one from its hub
RESERVED = ("flash", "sdpa", "flex_attention", "eager", "paged", "|", "/")


def register_attention(name: str = "fused_bias", *, backend: str = "auto") -> str:
    """Register `flashbias_attention`, and masks for it, with transformers under a name.

    Then `from_pretrained(..., attn_implementation=name)` and `set_attn_implementation(name)` take
    it. Masks are never dropped. What the kernels cannot do is done by transformers' own attention
    for that call, with a warning once per reason: attention weights, capped scores and sinks by
    the eager attention of the model, dropout by "sdpa". Sliding windows work where they are in the
    mask, and are refused elsewhere. Models whose attention is no function run as "eager" does,
    with a warning if transformers makes their masks; `set_attn_implementation` refuses them in a
    log message of transformers.

    Registering twice is the same as once; with another backend, the last one counts, also for
    models that are set to the name already.

    Args:
        name: must hold none of `RESERVED`: transformers takes any name with "flash" in it for
            flash attention, and then leaves out masks and passes sequences of several lengths.
        backend: of `flashbias_attention`.

    Returns:
        The name.

    Raises:
        UsageError: a name that is taken or reserved, an unknown backend, or a transformers
            without these interfaces.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend must be one of {BACKENDS}, got {backend!r}")
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise UsageError(
            f"this transformers has no attention interface: {error}", "install transformers>=5.16"
        ) from error
    _check_name(name, AttentionInterface().get(name))
    AttentionInterface.register(name, partial(attend, backend=backend))
    AttentionMaskInterface.register(name, attention_mask)
    return name


def _check_name(name: str, taken: Any) -> None:
    if not name or any(word in name for word in RESERVED):
        raise UsageError(
            f"{name!r} cannot be a name: transformers has a meaning of its own for {RESERVED}",
            "such as 'fused_bias'",
        )
    if taken is not None and getattr(taken, "func", None) is not attend:
        raise UsageError(f"another attention is registered as {name!r}", "choose another name")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function for transformers' `AttentionInterface`.

    Args:
        module: the attention module; `is_causal` is read from it where the call does not say.
        query: shape (B, H, N, D); B may be 1 for keys of several samples.
        key, value: shapes (B, Hkv, M, D) and (B, Hkv, M, Dv), Hkv divides H.
        attention_mask: None; boolean (B, M); or boolean or added to the scores, of any shape that
            broadcasts to (B, H, N, M). See `interface_masks`.
        dropout: of the weights.
        scaling: of the scores, default D ** -0.5.
        is_causal: counts where there is no mask, or one of two dimensions.
        position_bias: added to the scores, broadcastable to (B, H, N, M).
        backend: of `flashbias_attention`.
        **kwargs: `sliding_window`, `softcap`, `s_aux`, `sinks` and `output_attentions` are looked
            at; the rest does not concern attention.

    Returns:
        Tensor of shape (B, N, H, Dv), and None, or the weights where a call asks for them.

    Raises:
        UnsupportedTermError: what neither the kernels nor the attention of the model can do.
        ValueError, TypeError: masks that do not fit.
    """
    n, m = query.shape[-2], key.shape[-2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal, start = _causality(attention_mask, bool(causal), n, m)
    check_window(kwargs.get("sliding_window"), attention_mask, m)
    reason = eager_reason(kwargs)
    if reason is not None or dropout > 0.0:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        named = {"is_causal": is_causal, "position_bias": position_bias}
        options |= {key: given for key, given in named.items() if given is not None}
        call = HandedCall(module, (query, key, value), attention_mask, causal, start, options)
        if reason is not None:
            return run_eager(reason, call)
        return run_sdpa("a call drops attention weights at random", call)
    if causal and attention_mask is None and m > n:  # an empty cache of fixed length: cut its tail
        key, value, m = key[..., :n, :], value[..., :n, :], n
        position_bias = None if position_bias is None else position_bias[..., :n]
    key_mask, terms = _terms(attention_mask, position_bias, query, m)
    out = flashbias_attention(
        query.expand(key.shape[0], -1, -1, -1),
        key,
        value,
        ScoreBias(terms, query.shape[-3]) if terms else None,
        scale=scaling,
        causal=causal,
        query_start=start,
        key_mask=key_mask,
        backend=backend,
    )
    return out.transpose(1, 2).contiguous(), None


def _causality(mask: Tensor | None, causal: bool, n: int, m: int) -> tuple[bool, int]:
    """Whether causality is left to the call, and the place of the first query."""
    if mask is None:
        return causal and n > 1, 0
    return causal and mask.dim() == 2, m - n


def _terms(
    mask: Tensor | None, position_bias: Tensor | None, query: Tensor, m: int
) -> tuple[Tensor | None, tuple[Dense, ...]]:
    """The keys that are seen, (B, M), and what is added to the scores."""
    added = [] if position_bias is None else [position_bias]
    seen: Tensor | None = None
    if mask is not None:
        floats = mask.is_floating_point()
        if floats and mask.dim() > 2:
            added.append(mask)
        elif floats or (mask.dtype != torch.bool and mask.dim() != 2) or not 2 <= mask.dim() <= 4:
            raise UnsupportedTermError(
                f"a mask of {mask.dtype} and shape {tuple(mask.shape)} has no known meaning",
                "a mask is boolean or added to the scores, with four dimensions, or boolean (B, M)",
            )
        elif mask.dim() == 2:
            seen = mask.bool()
        elif mask.dim() == 4 and mask.shape[1:3] == (1, 1):
            seen = mask[:, 0, 0]
        else:
            added.append(hidden(mask, query.dtype))
    n = query.shape[-2]
    whole = (x.expand(*x.shape[:-2], n, m if x.shape[-1] == 1 else -1) for x in added)
    return seen, tuple(Dense(bias=x) for x in whole)

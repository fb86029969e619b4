"""Calls of `register_attention` that the fused path cannot do: transformers' own attention does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import UnsupportedTermError
from .fallback import WEIGHTS, say_original, weights_are_recorded
from .interface_masks import additive, boolean

#: arguments that change what attention computes, and that a model's own eager attention knows
_EAGER = {
    "softcap": "a call caps its scores (softcap)",
    "s_aux": "a call has attention sinks (s_aux)",
    "sinks": "a call has attention sinks (sinks)",
}
#: arguments that change it, and that transformers' "eager" and "sdpa" never get
_REFUSED = ("indices", "block_indices")


def eager_reason(options: Mapping[str, Any]) -> str | None:
    """Why the eager attention of the model has to run, if it has to.

    Args:
        options: keyword arguments of the call.

    Raises:
        UnsupportedTermError: nothing here can do the call.
    """
    for name in _REFUSED:
        if options.get(name) is not None:
            raise UnsupportedTermError(
                f"a call brings {name}, which registered attention does not know",
                "use attn_implementation='sdpa' or 'eager' for this model",
            )
    if options.get("output_attentions") or weights_are_recorded():
        return WEIGHTS
    return next((why for name, why in _EAGER.items() if options.get(name) is not None), None)


def check_window(window: Any, mask: Tensor | None, keys: int) -> None:
    """Raise UnsupportedTermError for a sliding window that nothing has put into the mask.

    Args:
        window: what the call says, None if nothing.
        mask: of the call. One with a row for each query has the window.
        keys: of the call; a window that is as long hides none.
    """
    if window is None or (mask is not None and mask.dim() != 2):
        return
    if not isinstance(window, int) or window < keys:
        raise UnsupportedTermError(
            f"a call has a sliding window of {window} among {keys} keys that is not in its mask",
            "use attn_implementation='sdpa' or 'eager' for this model",
        )


@dataclass(frozen=True, eq=False)
class HandedCall:
    """A call that is left to transformers' own attention.

    Attributes:
        module: the attention module.
        qkv: queries, keys and values, as the call brings them.
        mask, causal, start: as in `additive`.
        options: all other arguments of the call.
    """

    module: nn.Module
    qkv: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    causal: bool
    start: int
    options: Mapping[str, Any]


def run_eager(reason: str, call: HandedCall) -> tuple[Tensor, Tensor | None]:
    """A call by the eager attention of its model, with a warning once per reason.

    Args:
        reason: why.
        call: what is computed.

    Returns:
        The output, (B, N, H, Dv), and the weights, (B, H, N, M).

    Raises:
        UnsupportedTermError: the model has no eager attention that is a function.
    """
    eager = _eager_attention(call.module)
    if eager is None:
        raise UnsupportedTermError(
            f"{reason}, and {type(call.module).__name__} has no eager attention to run instead",
            "use attn_implementation='eager' for this model",
        )
    say_original(reason)
    added = additive(call.mask, call.causal, call.start, *call.qkv[:2])
    out: tuple[Tensor, Tensor | None] = eager(call.module, *call.qkv, added, **call.options)
    return out


def _eager_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The function that the file of the model, or of a class that it is made from, has for it."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            attention: Callable[..., Any] = found
            return attention
    return None


def run_sdpa(reason: str, call: HandedCall) -> tuple[Tensor, None]:
    """A call by transformers' function for torch's attention; as `run_eager`, without weights."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    say_original(reason)
    mask = call.mask
    if mask is not None:  # without one, it goes by `is_causal` as this package does
        mask = boolean(mask, call.causal, call.start, *call.qkv[:2])
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out: tuple[Tensor, None] = sdpa(call.module, *call.qkv, mask, **call.options)
    return out

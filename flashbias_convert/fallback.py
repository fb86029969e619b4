"""Says when a patched module runs its original code, because the fused path cannot do a call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from .attention.backends import BackendFallbackWarning

#: why calls run the original attention
WEIGHTS = "a call asks for attention weights, which the fused path never makes"
NO_PADDING_MASK = "the mask of a call is no padding mask"


def weights_are_recorded() -> bool:
    """Whether transformers records attention weights now, in this thread.

    Newer models do not tell their attention modules that weights are asked for: hooks collect
    what the modules return.
    """
    recording = sys.modules.get("transformers.utils.output_capturing")
    if recording is None:
        return False
    collector = recording._active_collector
    if torch.compiler.is_compiling():  # which cannot trace `get`; there it is a plain variable
        collected = getattr(collector, "global_var", None)
    else:
        collected = collector.get()
    return any("attentions" in key for key in collected or ())


def wants_weights(config: Any, call: Mapping[str, Any]) -> bool:
    """Whether a call in a model of transformers asks for attention weights."""
    wanted = call.get("output_attentions")
    return bool(getattr(config, "output_attentions", False) if wanted is None else wanted)


def say_original(reason: str) -> None:
    """Warn that the original attention runs: once per process and reason, and when it is traced."""
    if torch.compiler.is_compiling():
        _warn_while_tracing(reason)
    else:
        _warn(reason)


def _warn_while_tracing(reason: str) -> None:
    _warn(reason)


# torch.compile runs it while it traces
_warn_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"flashbias_convert runs the original attention: {reason}",
        BackendFallbackWarning,
        stacklevel=4,
    )

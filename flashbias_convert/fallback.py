"""Says when a patched module runs its original code, because the fused path cannot do a call."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from .attention.backends import BackendFallbackWarning


def say_original(reason: str) -> None:
    """Warn, once per process and reason, that the original attention runs."""
    if not torch.compiler.is_compiling():
        _warn(reason)


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"flashbias_convert runs the original attention: {reason}",
        BackendFallbackWarning,
        stacklevel=4,
    )

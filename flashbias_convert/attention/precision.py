"""Autocast is none of the operator's business: it chooses the precision of every step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def without_autocast(device: torch.device, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)` with autocast switched off on a device.

    Autocast would round products, and it refuses to join columns of fp16, the dtype of factors,
    where it is set to bf16.
    """
    if not torch.is_autocast_enabled(device.type):
        return run(*args)
    with torch.autocast(device.type, enabled=False):
        return run(*args)

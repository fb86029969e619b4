"""Modules that are known by their parts: tried out with random numbers before they are trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .recipe import UnsupportedSite


def require_result(call: Callable[[], Any], right: Tensor, what: str) -> None:
    """Refuse a module whose forward computes something else than its parts suggest.

    Args:
        call: runs the forward of a copy of the module, in float64.
        right: what it should return, written out.
        what: whose parts the module has, for the message.

    Raises:
        UnsupportedSite: it raises, returns no tensor, or another one.
    """
    try:
        found = call()
    except Exception as error:
        reason = f"its forward cannot be tried out: {type(error).__name__}: {error}"
        raise UnsupportedSite(reason) from error
    if not isinstance(found, Tensor) or not torch.allclose(found, right, rtol=1e-6, atol=1e-8):
        raise UnsupportedSite(f"it has the parts of {what}, but computes something else")

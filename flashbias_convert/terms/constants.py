"""Small tensors of integers that depend on no input: made once, and kept on their device.

To copy one to a card in every call would wait for the card, and a CUDA graph cannot record it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

#: How many to keep; a model has a few dozen.
MOST = 4096
_KEPT: dict[Hashable, Tensor] = {}


def kept(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """``make(*args)``, from before if it has been called like this. Not to be written to.

    Args:
        make: a function of a module.
        args: hashable, among them the device.
    """
    if torch.compiler.is_compiling() or is_watched():
        return make(*args)  # what a trace makes is not real
    key = (make, *args)
    found = _KEPT.get(key)
    if found is None:
        with torch.inference_mode(False):  # for calls in every mode
            found = make(*args)
        if len(_KEPT) < MOST:  # none is ever given up: a CUDA graph may read its memory
            _KEPT[key] = found
    return found


def is_watched() -> bool:
    """Whether a mode or a transform of torch.func sees torch's operations.

    It may trace them, compute nothing, or give tensors that are only shells of others.
    """
    active: bool = torch._C._are_functorch_transforms_active()
    return active or torch._C._len_torch_dispatch_stack() > 0


def integers(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers (len(values),)."""
    return torch.tensor(values, dtype=dtype, device=device)


def columns_past(ranks: tuple[int, ...], columns: int, device: torch.device) -> Tensor:
    """Whether a column is past the rank of its head, (len(ranks), 1, columns)."""
    # made on the CPU: what a stream has computed another one might read too early
    own = torch.tensor(ranks)[:, None, None]
    return (torch.arange(columns) >= own).to(device)

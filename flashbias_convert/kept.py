"""What layers work out from the same thing in every call, kept where they find it again.

Small tensors cost little memory and no arithmetic, but a launch each, which is what a call with
few tokens spends its time on. Nothing is kept while torch.compile traces: it finds by itself what a
graph computes twice, and a graph must not hold on to what its trace left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_flashbias_made"


def kept_with(tensor: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` makes of a tensor, made once until the tensor changes.

    Args:
        tensor: one that a call makes and its layers share. A parameter, which may change without a
            trace, has nothing kept.
        key: what is made, and of what else.
        make: its results must not be views of the tensor, which would keep it alive for ever.
    """
    if torch.compiler.is_compiling() or isinstance(tensor, nn.Parameter):
        return make()
    version = _version(tensor)
    known: tuple[int, dict[Hashable, Any]] | None = getattr(tensor, _ATTRIBUTE, None)
    if known is None or known[0] != version:
        known = (version, {})
        setattr(tensor, _ATTRIBUTE, known)
    if key not in known[1]:
        known[1][key] = make()
    return known[1][key]


def is_kept(tensor: Tensor, key: Hashable) -> bool:
    """Whether `kept_with` has this already."""
    known: tuple[int, dict[Hashable, Any]] | None = getattr(tensor, _ATTRIBUTE, None)
    return known is not None and known[0] == _version(tensor) and key in known[1]


def kept_with_both(first: Tensor, second: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
    """As `kept_with`, made of two tensors; kept with the first, and `second` beside it.

    The tensor itself is kept, so that no other one gets its address.
    """
    if torch.compiler.is_compiling():  # the id would be a guard: compiled anew for every tensor
        return make()
    key = (key, id(second), _version(second))
    beside, made = kept_with(first, key, lambda: (second, make()))
    return made if beside is second else make()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

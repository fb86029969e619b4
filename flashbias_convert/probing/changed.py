"""A second input that is like the first, but not the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..inputs import Batch

#: integers of these names say where something is, or whether it is there
_FIXED = ("mask", "position", "type", "cache", "length", "offset")


def changed(batch: Batch, seed: int = 0) -> Batch | None:
    """The batch with other values of the same kind, or None if there is nothing to change.

    Floating-point tensors are drawn anew with their mean and spread; whole numbers, which may
    point into tables, change places along their second dimension. Masks and positions stay.

    Args:
        batch: arguments of one call.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    args = tuple(_other("", value, generator) for value in batch.args)
    kwargs: Mapping[str, Any] = {
        name: _other(name, value, generator) for name, value in batch.kwargs.items()
    }
    pairs = [*zip(batch.args, args, strict=True), *((batch.kwargs[k], kwargs[k]) for k in kwargs)]
    same = all(a is b or torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    return None if same else replace(batch, args=args, kwargs=kwargs)


def alike(first: Batch, second: Batch) -> bool:
    """Whether two batches have the same arguments of the same shapes, with different values."""
    if len(first.args) != len(second.args) or first.kwargs.keys() != second.kwargs.keys():
        return False
    pairs = [
        *zip(first.args, second.args, strict=True),
        *((first.kwargs[k], second.kwargs[k]) for k in first.kwargs),
    ]
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if any(a.shape != b.shape for a, b in tensors):
        return False
    return any(not torch.equal(a, b) for a, b in tensors)


def _other(name: str, value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or any(word in name for word in _FIXED):
        return value
    if value.is_floating_point():
        spread, mean = torch.std_mean(value.double(), correction=0)
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        drawn = drawn.to(value.device) * (spread if spread > 0 else 1.0) + mean
        return drawn.to(value.dtype)
    if value.dtype == torch.bool or value.dim() < 2:
        return value
    order = torch.randperm(value.shape[1], generator=generator).to(value.device)
    return value[:, order]

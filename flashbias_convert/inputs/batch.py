"""What goes through a model when two models are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..errors import UsageError

#: what the labels of a batch are: one class per sample, or the tokens themselves
Task = Literal["classes", "next token"]


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        size: number of samples.
        labels: int64; classes (B,), or tokens (B, L) of which each is the target of the one
            before; None where nothing is known.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    size: int = 1
    labels: Tensor | None = None

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy on `device` whose floating-point tensors have `dtype`."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        args = tuple(move(value) for value in self.args)
        kwargs = {name: move(value) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, labels=move(self.labels))


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches, and where they come from.

    Attributes:
        batches: read once, in order.
        source: what they are, in words.
        notes: what the user should know about how they were made.
        task: what the labels of the batches are, None where there are none.
    """

    batches: Iterable[Batch]
    source: str
    notes: tuple[str, ...] = ()
    task: Task | None = None


def as_batch(value: Any) -> Batch:
    """One call: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Batch`.

    Raises:
        UsageError: anything else, or no tensor in it.
    """
    if isinstance(value, Batch):
        return value
    if isinstance(value, Tensor):
        value = (value,)
    if isinstance(value, Mapping):
        return Batch(kwargs=dict(value), size=_size(value.values()))
    if isinstance(value, tuple):
        return Batch(args=value, size=_size(value))
    raise UsageError(
        f"a batch of inputs must be a tensor, a tuple or a mapping, got {type(value).__name__}",
        "of a loader that gives [images, labels], pass the images: [x for x, _ in loader]",
    )


def _size(values: Iterable[Any]) -> int:
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise UsageError("a batch of inputs holds no tensor")
    return int(sizes[0])

"""What a caller passes as inputs: calls of a model, which may not take them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlashBiasError, UsageError
from ..swap import original_class
from .batch import Batch, Inputs, as_batch


def as_calls(value: Any) -> Iterable[Any]:
    """One call, or an iterable of calls, as the calls.

    A tuple is one call, whose arguments it holds. ``x.split(32)`` returns a tuple, too, of which
    each part was meant to be a call: where the parts of a tuple lie one behind the other in one
    tensor, nobody can tell, so nothing is guessed.

    Raises:
        UsageError: neither, or such a tuple.
    """
    if isinstance(value, tuple) and _pieces_of_one(value):
        raise UsageError(
            f"a tuple holds the arguments of one call, and this one holds {len(value)} pieces of "
            "one tensor",
            "pass list(pieces) for one call with each of them, [pieces] for one with all of them",
        )
    if isinstance(value, Batch | Tensor | tuple | Mapping):
        return [value]
    if not isinstance(value, Iterable):
        raise UsageError(f"inputs must be tensors, got {type(value).__name__}")
    return value


def _pieces_of_one(values: tuple[Any, ...]) -> bool:
    """Whether these are what `Tensor.split` makes of the first dimension, at least two."""
    if len(values) < 2 or not all(isinstance(v, Tensor) and v.dim() for v in values):
        return False
    try:
        return all(map(_follows, values, values[1:]))
    except RuntimeError:  # of tensors without a storage
        return False


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether `other` begins where `one` ends, in the same storage."""
    alike = (one.dtype, one.shape[1:], one.stride()) == (
        other.dtype,
        other.shape[1:],
        other.stride(),
    )
    if not alike or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    return bool(other.storage_offset() == one.storage_offset() + one.shape[0] * one.stride(0))


def require_taken(model: nn.Module, batch: Batch) -> None:
    """Raise UsageError if the forward of `model` does not take the arguments of `batch`."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it has none that could be read
        return
    try:
        signature.bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise UsageError(
            f"{type(model).__name__} does not take these inputs: {error}; it takes "
            f"{', '.join(signature.parameters) or 'nothing'}",
            "a tuple holds the positional arguments of one call, a mapping those by name; pass a "
            "list for several calls",
        ) from error


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Inside, whatever a model raises is the fault of its inputs: a UsageError.

    Our own errors, and memory that ran out, stay what they are.
    """
    try:
        yield
    except (FlashBiasError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may refuse its inputs in any way
        raise UsageError(
            f"{original_class(model).__name__} does not run with these inputs: "
            f"{type(error).__name__}: {error}",
            "are they of the sizes that it takes?",
        ) from error


def as_inputs(
    value: Any, labels: Tensor | None = None, *, model: nn.Module | None = None
) -> Inputs:
    """What a caller of the API passed as inputs.

    Args:
        value: `Inputs`, one call (see `as_batch`), or an iterable of calls that is no tuple.
        labels: classes of all samples in order, int64 of shape (samples,).
        model: what the calls are for; each is compared with its forward.

    Raises:
        UsageError: something else, labels of another number than samples, or arguments that the
            model does not take; the last while the batches are read.
    """
    if isinstance(value, Inputs):
        if labels is not None:
            raise UsageError("these inputs bring their own labels", "leave out labels=")
        return value
    calls = as_calls(value)
    if labels is None:
        return Inputs((_call_of(model, call) for call in calls), "the caller's inputs")
    batches = [_call_of(model, call) for call in calls]
    total = sum(batch.size for batch in batches)
    if labels.shape != (total,):
        raise UsageError(f"expected {total} labels, one per sample, got {tuple(labels.shape)}")
    parts = labels.split([batch.size for batch in batches])
    labelled = [replace(b, labels=part) for b, part in zip(batches, parts, strict=True)]
    return Inputs(labelled, "the caller's inputs", task="classes")


def _call_of(model: nn.Module | None, value: Any) -> Batch:
    batch = as_batch(value)
    if model is not None:
        require_taken(model, batch)
    return batch

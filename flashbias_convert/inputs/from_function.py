"""Inputs from a function of the user."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import UsageError
from .batch import Batch, Inputs, as_batch
from .calls import as_calls, require_taken


def function_inputs(model: nn.Module, function: str | Callable[..., Any], samples: int) -> Inputs:
    """What a function makes of a model: one call, or an iterable of calls (see `as_batch`).

    Args:
        model: passed to the function, which may look at its sizes.
        function: or "package.module:function", which is imported.
        samples: no further call is taken once there are so many.

    Raises:
        UsageError: it cannot be imported, is no function, raises, or returns something else.
    """
    name = function if isinstance(function, str) else getattr(function, "__qualname__", "function")
    call = _import(function) if isinstance(function, str) else function
    try:
        made = call(model)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name} raised {reason}", "it is called with the model") from error
    try:
        iterator = iter(as_calls(made))
    except UsageError as error:
        raise UsageError(f"what {name} returns: {error.message}", error.hint) from error

    def batches() -> Iterator[Batch]:
        taken = 0
        while taken < samples:
            value = next(iterator, None)
            if value is None:
                return
            batch = as_batch(value)
            require_taken(model, batch)
            taken += batch.size
            yield batch

    return Inputs(batches(), f"the inputs of {name}")


def _import(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        hint = f"name the module: {module[:-3]}:{attribute}" if module.endswith(".py") else ""
        raise UsageError(f"cannot import {module}: {error}", hint) from error
    except AttributeError as error:
        raise UsageError(f"module {module} has no {attribute!r}") from error
    if not callable(found):
        raise UsageError(f"{name} is not a function")
    result: Callable[..., Any] = found
    return result

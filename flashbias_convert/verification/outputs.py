"""What a model or a module returned, as named tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(output: Any, name: str = "") -> dict[str, Tensor]:
    """The floating-point tensors in an output, by name, in order.

    Args:
        output: a tensor, or tuples, lists, mappings and dataclasses of outputs, nested as they
            like. Caches and other objects are passed over.
        name: of a tensor that is the output itself; default "output".
    """
    return dict(_walk(output, name))


def _walk(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _walk(value, _join(name, key))
    elif hasattr(output, "_asdict"):  # a named tuple
        yield from _walk(output._asdict(), name)
    elif isinstance(output, tuple | list):
        for position, value in enumerate(output):
            yield from _walk(value, _join(name, position))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _walk(getattr(output, field.name), _join(name, field.name))


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def logits_name(tensors: Mapping[str, Tensor]) -> str | None:
    """Which of the tensors of a model's output holds logits over classes or tokens.

    The one that is called so, else, where outputs have no names, the first, if it looks like
    (samples, classes) or (samples, tokens, classes).
    """
    named = [name for name in tensors if name.rpartition(".")[2].endswith("logits")]
    if named:
        return "logits" if "logits" in named else named[0]
    first = next(iter(tensors), "")
    if first != "output" and not first.split(".")[0].isdigit():
        return None
    return first if tensors[first].dim() in (2, 3) and tensors[first].shape[-1] > 1 else None

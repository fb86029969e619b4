"""Whether the terms that came from a file are what their kinds allow."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import nn

from ..errors import CheckpointError
from ..patched_attention import PatchedAttention
from ..terms import Lookup, LowRank, RelativeTable, Term


def check_loaded(model: nn.Module, path: str | Path) -> None:
    """Raise CheckpointError unless the terms of all patched modules can be computed with.

    Values that are not tensors must have their types, numbers must be numbers, and codes must stay
    inside their table: a kernel would read whatever lies beyond it. Terms must not say that they
    belong to other weights.

    Args:
        model: a patched model whose terms are loaded.
        path: where they came from, for messages.
    """
    for name, module in model.named_modules():
        if not isinstance(module, PatchedAttention):
            continue
        try:
            if module.is_unmatched():
                raise ValueError("they were made from other weights than those beside them")
            for term in module.score_bias.bias.terms:
                _check_static(term)
                _check_numbers(term)
                if isinstance(term, Lookup | RelativeTable):
                    term.check_codes()
            for built in module.score_bias.builder_modules().values():
                built.check()
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"the terms of {name!r} in {path} are damaged: {error}"
            ) from error


def _check_static(term: Term) -> None:
    hints = _hints(type(term))  # type: ignore[arg-type]
    for name in term.static():
        value = getattr(term, name)
        if not _is_a(value, hints[name]):
            raise TypeError(f"{name} of {term.kind} must not be {value!r}")


@cache
def _hints(kind: type[Term]) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_numbers(term: Term) -> None:
    """No conversion writes NaN, nor factors that are infinite and so make NaN."""
    for name, tensor in term.tensors().items():
        if not tensor.is_floating_point():
            continue
        if tensor.isnan().any() or (isinstance(term, LowRank) and tensor.isinf().any()):
            raise ValueError(f"{name} of {term.kind} holds NaN or infinity")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value has a type; knows the types that fields of terms have."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, part) for part in parts)
    if origin is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_is_a(v, parts[0]) for v in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)

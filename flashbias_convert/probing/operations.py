"""What tensor operations do to scores, by the names that torch gives them below Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .scores import Scores

#: Scores below this are masked, not biased: no query attends to such a key.
MASKED_BELOW = -1e4

#: operations that keep every value, and the order of the dimensions
_SAME_ORDER = {
    "view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "unsqueeze", "squeeze",
    "slice", "select", "narrow", "split", "split_with_sizes", "unbind", "chunk", "unflatten",
}  # fmt: skip
_OTHER_ORDER = {"permute", "transpose", "t"}
_SAME_VALUES = {
    "alias", "clone", "contiguous", "detach", "_to_copy", "to", "dropout", "native_dropout",
    "lift_fresh",
}  # fmt: skip
#: views of all or of a part of what they are made from
SHAPES = _SAME_ORDER | _OTHER_ORDER
_RESHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}


def name_of(func: Any) -> str:
    """The name of an operator without its overload and without the mark of one in place."""
    name: str = func.overloadpacket.__name__
    return name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name


def reshaping(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
    """An operation of `SHAPES` as a function of its tensor alone."""
    if name_of(func) in _RESHAPES:
        return lambda part: part.reshape(args[1])
    return lambda part: func(part, *args[1:], **kwargs)


def after(
    scores: Scores, func: Any, at: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Scores | None:
    """The scores after an operation on them whose result is one tensor.

    Args:
        scores: what is known of ``args[at]``. Whatever else is among `args` counts as a constant.
        func: an operator of torch.
        at: position of the scores among `args`.
        args, kwargs: its arguments.

    Returns:
        None where the result is no longer made of scores alone, or nobody knows.
    """
    name = name_of(func)
    if name in SHAPES:
        permuted = name in _OTHER_ORDER and not _is_trivial(func, scores.shape, args, kwargs)
        return scores.reshaped(reshaping(func, args, kwargs), permuted=permuted)
    if name in _SAME_VALUES:
        return scores
    handler = _HANDLERS.get(name)
    changed = None if handler is None else handler(scores, at, args, kwargs)
    if changed is not None:
        return changed
    return scores.doubtful(name) if torch.Tag.pointwise in func.tags else None


def _is_trivial(func: Any, shape: torch.Size, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether only dimensions of size one change places."""
    out = func(torch.empty(shape, device="meta"), *args[1:], **kwargs)
    strides = [s for s, size in zip(out.stride(), out.shape, strict=True) if size > 1]
    return strides == sorted(strides, reverse=True)


# -- one function per kind of operation ------------------------------------------------------

_Args = Sequence[Any]
_Options = dict[str, Any]


def _add(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    alpha = float(kwargs.get("alpha", 1))
    if at == 0:
        return scores.plus(args[1], alpha)
    return (scores if alpha == 1.0 else scores.times(alpha)).plus(args[0])


def _sub(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    alpha = float(kwargs.get("alpha", 1))
    return scores.plus(args[1], -alpha) if at == 0 else scores.times(-alpha).plus(args[0])


def _rsub(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    return _sub(scores, 1 - at, (args[1], args[0]), kwargs)


def _mul(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    return scores.times(args[1 - at])


def _div(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    if at != 0 or kwargs.get("rounding_mode") is not None:
        return None
    other = args[1]
    return scores.times(1 / other.double() if isinstance(other, Tensor) else 1 / other)


def _neg(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    return scores.times(-1.0)


def _masked_fill(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    return scores.hiding(args[1]) if at == 0 and _is_masking(args[2]) else None


def _where(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    if at == 0 or not _is_masking(args[3 - at]):
        return None
    return scores.hiding(~args[0] if at == 1 else args[0])


def _maximum(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    return scores if _is_masking(args[1 - at]) else None


def _clamp(scores: Scores, at: int, args: _Args, kwargs: _Options) -> Scores | None:
    low, high = (*args[1:], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    return scores if at == 0 and high is None and _is_masking(low) else None


def _is_masking(value: Any) -> bool:
    """Whether all of it lies where nothing is attended to."""
    if isinstance(value, Tensor):
        return bool((value <= MASKED_BELOW).all())
    return isinstance(value, int | float) and value <= MASKED_BELOW


_HANDLERS: dict[str, Callable[[Scores, int, _Args, _Options], Scores | None]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "masked_fill": _masked_fill,
    "where": _where,
    "maximum": _maximum,
    "clamp": _clamp,
    "clamp_min": _clamp,
}

"""Bring the tensors of a file under the names of a model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .views import View, views, with_owner

logger = logging.getLogger(__name__)

_QUANTISED = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


def align(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors under the keys of ``model.state_dict()``, exactly those.

    Names are taken as they are, or else mapped by the model's own library (timm knows the layouts
    of its models' first authors), or without the name under which a training wrapper holds the
    model, such as ``model.`` beside ``loss.``. A tensor that the model ties to another may be
    absent.

    Raises:
        CheckpointError: keys, shapes or kinds of dtype that do not fit; two models that do, with
            other weights, neither of which are averages of the other.
    """
    found, view, others = _find(tensors, model)
    if view.prefix and not view.averaged:
        _require_one_model(found, view, others)
    if view.rest:
        logger.warning(
            "took the tensors under %r; %d others are not part of the model: %s",
            view.prefix,
            len(view.rest),
            _some(list(view.rest)),
        )
    return found


def fits(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether `align` would succeed; nothing is resized to make it fit."""
    try:
        _find(tensors, model)
    except CheckpointError:
        return False
    return True


_Found = dict[str, Tensor]


def _find(
    tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[_Found, View, Iterator[tuple[_Found, View]]]:
    """The first view that is this model, under the model's names; and the others that are, too."""
    target = model.state_dict(keep_vars=True)  # so that tied ones are one, on meta, too
    distinct = len({_identity(tensor) for tensor in target.values()})
    tried: list[_Found] = []
    fitting = _fitting(views(tensors, at_least=distinct), model, target, tried)
    first = next(fitting, None)
    if first is None:
        raise _misfit(max(tried, key=lambda c: len(c.keys() & target.keys())), target)
    check_kinds(first[0], target)
    return *first, fitting


def _fitting(
    parts: Iterable[View], model: nn.Module, target: Mapping[str, Tensor], tried: list[_Found]
) -> Iterator[tuple[_Found, View]]:
    """Of each view what has the names of `target`; the others are added to `tried`."""
    for view in parts:
        owned = with_owner(view.tensors, target)
        candidates = [view.tensors, *_remapped(view.tensors, model)]
        for candidate in candidates + ([owned.tensors] if owned else []):
            found = fill_tied(candidate, target)
            if found.keys() == target.keys():
                yield {key: found[key] for key in target}, view
                break
            tried.append(found)


def _require_one_model(found: _Found, view: View, others: Iterable[tuple[_Found, View]]) -> None:
    """A student and its teacher: which of them is meant only the user knows."""
    for other, its_view in others:
        shapes_fit = all(found[key].shape == tensor.shape for key, tensor in other.items())
        if its_view.lies_in(view) or not shapes_fit:
            continue
        if not all(_is_same(found[key], tensor) for key, tensor in other.items()):
            raise CheckpointError(
                f"the file holds two such models, under {view.prefix!r} and {its_view.prefix!r}",
                "save the state dict of the one that is meant",
            )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if _identity(one) == _identity(other):  # a wrapper that has two names for its model
        return True
    return one.dtype == other.dtype and torch.equal(one, other)


def _remapped(tensors: Mapping[str, Tensor], model: nn.Module) -> list[dict[str, Tensor]]:
    """What the filter function of a timm model makes of a foreign layout, if it has one."""
    module = type(model).__module__
    filter_fn = getattr(sys.modules.get(module), "checkpoint_filter_fn", None)
    if filter_fn is None or not module.startswith("timm."):
        return []
    try:
        found = filter_fn(dict(tensors), model)
    except Exception:  # a layout that it was not written for
        return []
    same = {id(t) for t in tensors.values()}
    # filters also resize tables and patch embeddings; a conversion must not change weights
    kept = all(id(t) in same for t in found.values())
    return [dict(found)] if kept else []


def fill_tied(found: dict[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`found`, and for each name that it lacks the tensor of a name that is tied to it.

    Args:
        found: by names of a model.
        target: ``model.state_dict(keep_vars=True)``.
    """
    present = {_identity(target[k]): t for k, t in found.items() if k in target}
    tied = {
        k: present[_identity(t)]
        for k, t in target.items()
        if k not in found and _identity(t) in present
    }
    return {**found, **tied}


def _identity(tensor: Tensor) -> object:
    # tensors on the meta device have no address
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())


def check_kinds(found: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors have the shapes and kinds of dtype of `target`."""
    for key, wanted in target.items():
        tensor = found[key]
        if tensor.shape != wanted.shape:
            raise CheckpointError(
                f"{key} has shape {tuple(tensor.shape)}, the model expects {tuple(wanted.shape)}",
                "is this the right architecture? see --arch and --arch-args",
            )
        if tensor.dtype in _QUANTISED or (tensor.is_floating_point() != wanted.is_floating_point()):
            raise CheckpointError(
                f"{key} has dtype {tensor.dtype}, the model expects {wanted.dtype}",
                "quantised checkpoints are not supported",
            )


def _misfit(found: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> CheckpointError:
    missing = [k for k in target if k not in found]
    surplus = [k for k in found if k not in target]
    matched = len(target) - len(missing)
    parts = [f"only {matched} of the model's {len(target)} tensors are in the file"]
    if not missing:
        parts = ["the file holds tensors that the model lacks"]
    if missing:
        parts.append(f"missing: {_some(missing)}")
    if surplus:
        parts.append(f"not in the model: {_some(surplus)}")
    return CheckpointError(
        "; ".join(parts), "is this the right architecture? see --arch and --arch-args"
    )


def _some(names: list[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")

"""From what a file holds to a flat state dict: wrappers and prefixes come off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

#: entries that hold the weights, averaged weights first, as in timm ("params" is of BasicSR)
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "params_ema",
    "state_dict",
    "model",
    "module",
    "params",
)
PREFIXES = ("module.", "_orig_mod.")
_MAX_DEPTH = 5


def unwrap(content: Any) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Split what `torch.load` returned.

    Returns:
        The state dict; the entries beside it, such as ``arch`` and ``args``; and notes for the
        user on what was chosen.

    Raises:
        CheckpointError: there is no state dict in it.
    """
    extras: dict[str, Any] = {}
    trail: list[str] = []
    for _ in range(_MAX_DEPTH):
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"expected a state dict, found {type(content).__name__}",
                "save model.state_dict(), not the model",
            )
        wrapper = next((k for k in WRAPPERS if _holds_tensors(content.get(k))), None)
        if wrapper is None:
            break
        extras = {**{k: v for k, v in content.items() if k not in WRAPPERS}, **extras}
        trail.append(wrapper)
        content = content[wrapper]
    tensors, notes = _tensors(content)
    if trail:
        notes.insert(0, f"took the weights from {'.'.join(trail)!r}")
    return tensors, extras, notes


def _holds_tensors(value: Any, depth: int = 0, seen: set[tuple[int, int]] | None = None) -> bool:
    # a pickle can hold one mapping in many places: each is looked into once
    seen = set() if seen is None else seen
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH or (id(value), depth) in seen:
        return False
    seen.add((id(value), depth))
    return any(isinstance(v, Tensor) or _holds_tensors(v, depth + 1, seen) for v in value.values())


def _tensors(content: Mapping[Any, Any]) -> tuple[dict[str, Tensor], list[str]]:
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
    skipped = [str(k) for k, v in content.items() if not isinstance(v, Tensor)]
    notes = [f"skipped {len(skipped)} entries that are not tensors"] if tensors and skipped else []
    return tensors, notes


def _require_plain(name: str, tensor: Tensor) -> None:
    kinds = {
        "on the meta device, it has no values": tensor.is_meta,
        "quantised": tensor.is_quantized,
        "a nested tensor": tensor.is_nested,
        "sparse": tensor.layout != torch.strided,
        "complex": tensor.is_complex(),
    }
    for kind, applies in kinds.items():
        if applies:
            raise CheckpointError(
                f"{name} is {kind}", "only plain dense tensors of real numbers can be converted"
            )


def strip_lightning(tensors: dict[str, Tensor], extras: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove the name under which a module of Lightning holds its model, if there is just one."""
    if "pytorch-lightning_version" not in extras:
        return tensors
    owners = {key.partition(".")[0] for key in tensors}
    if len(owners) != 1 or not all("." in key for key in tensors):
        return tensors
    return {key.partition(".")[2]: tensor for key, tensor in tensors.items()}


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of DataParallel and torch.compile, in any order and number.

    Raises:
        CheckpointError: two keys become one.
    """
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        short = key
        while short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in out:
            raise CheckpointError(f"two tensors are called {short!r} once prefixes are removed")
        out[short] = tensor
    return out

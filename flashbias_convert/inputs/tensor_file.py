"""Inputs from a file of named tensors: ``.npz`` or ``.safetensors``."""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import UsageError
from ..swap import original_class
from .batch import Batch, Inputs, Task

LABELS = "labels"
#: what numpy calls arrays that were saved without a name
_UNNAMED = re.compile(r"arr_(\d+)")


def tensor_inputs(model: nn.Module, file: Path, samples: int, batch: int) -> Inputs:
    """The first samples of a file.

    Every array is an argument of the model's forward, by its name; arrays that numpy named
    ``arr_0``, ``arr_1`` ... are positional. The first dimension counts samples. One-dimensional
    integers called ``labels`` are classes, and not passed on.

    Raises:
        UsageError: an unreadable file, arrays of different lengths, or a name that the model
            does not take.
    """
    tensors = _read(file)
    labels = tensors.get(LABELS)
    if labels is not None and labels.dim() == 1 and not labels.is_floating_point():
        tensors = {name: t for name, t in tensors.items() if name != LABELS}
    else:
        labels = None
    count = _count(tensors if labels is None else {**tensors, LABELS: labels}, file)
    unnamed = sorted((int(m[1]), name) for name in tensors if (m := _UNNAMED.fullmatch(name)))
    positional = [name for _, name in unnamed]
    named = [name for name in tensors if name not in positional]
    _require_taken(model, named, file)
    used = min(samples, count)

    def batches() -> Iterator[Batch]:
        for start in range(0, used, batch):
            part = slice(start, min(start + batch, used))
            args = tuple(tensors[name][part] for name in positional)
            kwargs = {name: tensors[name][part] for name in named}
            own = None if labels is None else labels[part].long()
            yield Batch(args, kwargs, part.stop - part.start, own)

    task: Task | None = None if labels is None else "classes"
    return Inputs(batches(), f"{used} of {count} samples in {file}", task=task)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    except (OSError, ValueError, TypeError, SafetensorError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _count(tensors: dict[str, Tensor], file: Path) -> int:
    if not any(name != LABELS for name in tensors):
        raise UsageError(f"{file} holds no inputs")
    sizes = {name: t.shape[0] if t.dim() else 0 for name, t in tensors.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise UsageError(
            f"the arrays in {file} must hold the same number of samples, at least one: "
            + ", ".join(f"{name} has {size}" for name, size in sizes.items())
        )
    return next(iter(sizes.values()))


def _require_taken(model: nn.Module, names: list[str], file: Path) -> None:
    parameters = inspect.signature(original_class(model).forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    takes = [name for name in parameters if name != "self"]
    unknown = [name for name in names if name not in takes]
    if unknown:
        raise UsageError(
            f"{file} holds {', '.join(map(repr, unknown))}, which the model does not take",
            f"it takes {', '.join(takes)}",
        )

"""A file makes us allocate no more than its own size backs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ..errors import CheckpointError, UsageError
from .architecture import CALLER, Architecture
from .build import build_model
from .read import Checkpoint

#: any number up to here is harmless: a list of so many entries takes some tens of megabytes
_SMALL_NUMBER = 2**20
#: a number of rows, classes or tokens stands for at least so many bytes of weights
_BYTES = 64
#: parts of the names of numbers that are no sizes
_UNRELATED = ("theta", "length")
#: what modules may cost beside the weights in the file, in bytes: masks, indexes, tables
_BUFFERS = 2**30
#: modules that are made and replaced while a model is built
_SPARE_MODULES, _SPARE_ELEMENTS = 1000, 2**20


def build_from_file(arch: Architecture, checkpoint: Checkpoint) -> nn.Module:
    """`build_model` for an architecture that a file may have named; see `check_size`."""
    check_size(arch, checkpoint)
    with _budget(arch, checkpoint):
        return build_model(arch)


def check_size(arch: Architecture, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a model would be far larger than the files of its weights.

    What the caller says himself is not limited.

    Args:
        arch: the architecture, which the checkpoint may have named.
        checkpoint: what was read.

    Raises:
        CheckpointError: more parameters, or larger buffers, than such files fill.
        UnknownArchitectureError: see `build_model`.
    """
    if arch.origin == CALLER:
        return
    _check_numbers(arch, arch.args, max(_size(checkpoint) // _BYTES, _SMALL_NUMBER))
    # models that compute while they are built have no form without memory
    with _budget(arch, checkpoint), suppress(UsageError):
        build_model(arch, "meta")


def _size(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.files)


def _check_numbers(arch: Architecture, value: Any, limit: int, name: str = "") -> None:
    """Raise CheckpointError for an integer that no size of this model can be."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_numbers(arch, part, limit, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            _check_numbers(arch, part, limit, name)
        # numbers of layers, stage by stage, become one list
        _check_numbers(arch, sum(v for v in value if isinstance(v, int)), limit, name)
    elif isinstance(value, int) and abs(value) > limit and not any(w in name for w in _UNRELATED):
        raise CheckpointError(
            f"{name or 'an argument'} is {str(value)[:30]} in {arch.origin}, more than the weights "
            "in the file can fill",
            "is it whole? what it is can also be said in arch=, or with --arch and --arch-args",
        )


@contextmanager
def _budget(arch: Architecture, checkpoint: Checkpoint) -> Iterator[None]:
    """Raise CheckpointError, inside, once modules hold more than the files can fill."""
    if arch.origin == CALLER:
        yield
        return
    size = _size(checkpoint)
    spent = {"parameters": 0, "elements": 0, "buffers": 0}
    most = {
        "parameters": 4 * len(checkpoint.tensors) + _SPARE_MODULES,
        "elements": 2 * size + _SPARE_ELEMENTS,  # a value takes a byte at least
        "buffers": 8 * size + _BUFFERS,
    }
    thread = threading.get_ident()

    def spend(name: str, amount: int) -> None:
        spent[name] += amount
        if spent[name] > most[name]:
            raise CheckpointError(
                f"{arch} (from {arch.origin}) is far larger than the weights in the file",
                "is this the right architecture? see --arch and --arch-args",
            )

    def on_parameter(_: nn.Module, name: str, tensor: Any) -> None:
        if threading.get_ident() == thread and isinstance(tensor, Tensor):
            spend("parameters", 1)
            spend("elements", tensor.numel())

    def on_buffer(_: nn.Module, name: str, tensor: Any) -> None:
        if threading.get_ident() == thread and isinstance(tensor, Tensor):
            spend("buffers", tensor.numel() * tensor.element_size())

    hooks = (
        register_module_parameter_registration_hook(on_parameter),
        register_module_buffer_registration_hook(on_buffer),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

"""Inputs for comparing two models: random ones, images, text, files of tensors, functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UsageError
from .batch import Batch, Inputs, as_batch
from .calls import as_inputs, running
from .from_function import function_inputs
from .image_folder import image_inputs
from .random_inputs import random_inputs
from .tensor_file import tensor_inputs
from .text_file import text_inputs

__all__ = ["Batch", "Inputs", "as_batch", "as_inputs", "read_inputs", "running"]

RANDOM = "random"
_TENSORS = (".npz", ".safetensors")


def read_inputs(
    model: nn.Module,
    source: str | Path | Callable[..., Any] = RANDOM,
    *,
    samples: int = 32,
    batch: int = 8,
    seed: int = 0,
    tokens: int | None = None,
    assets: Path | None = None,
) -> Inputs:
    """Inputs for `model`.

    Args:
        model: the original; it says what it takes.
        source: "random", a folder of images, a file ``.npz`` or ``.safetensors`` of named tensors,
            any other file (a text), "package.module:function", or a function of the model.
        samples: how many at most, at least 1.
        batch: how many at once, at least 1.
        seed: of everything random.
        tokens: length of a sequence.
        assets: a folder that may hold a tokenizer or the config of an image processor.

    Raises:
        UsageError: nothing there, unreadable, or not what this model takes.
    """
    for name, value in (("samples", samples), ("batch", batch)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if tokens is not None and tokens < 1:
        raise UsageError(f"tokens must be at least 1, got {tokens}")
    if source == RANDOM:
        return random_inputs(model, samples, batch, seed, tokens)
    if callable(source) or (":" in str(source) and not Path(source).exists()):
        return function_inputs(model, source if callable(source) else str(source), samples)
    path = Path(source)
    if path.is_dir():
        return image_inputs(model, path, samples, batch, seed, assets)
    if not path.is_file():
        raise UsageError(
            f"there are no inputs {source}",
            "a folder of images, a text, an .npz or .safetensors, package.module:function, random",
        )
    if path.suffix in _TENSORS:
        return tensor_inputs(model, path, samples, batch)
    return text_inputs(model, path, samples, batch, seed, tokens, assets)

"""Checkpoints that are looked at without a model: there are only the tensors of biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..bare import Sizes, bare_model
from ..errors import UnknownArchitectureError
from .architecture import Architecture
from .open import OpenedModel, compute_dtype
from .read import Checkpoint

#: in the place of an architecture; nothing can be built from it
TENSORS_ALONE = Architecture("caller", "tensors alone")


def open_bare(
    checkpoint: Checkpoint,
    *,
    window: Sequence[int] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> OpenedModel:
    """Modules for the biases that tensors show by their names and shapes.

    Args:
        checkpoint: what was read; nothing but the tensors of biases is read from its files, if
            they can be memory-mapped.
        window: see `Sizes`.
        device: where biases are computed; default the CPU.
        dtype: in which; default float32, or float64 if the file holds float64.

    Raises:
        UnknownArchitectureError: no tensor looks like a bias.
    """
    sizes = Sizes(tuple(window), dtype=dtype or compute_dtype(checkpoint.tensors))
    model = bare_model(checkpoint.tensors, sizes)
    if model is None:
        raise UnknownArchitectureError(
            f"no tensor of {checkpoint.path} looks like one that a bias is made from",
            "say what it is for: --arch",
        )
    note = "biases are made from tensors alone: masks, and which model this is, stay unknown"
    told = replace(checkpoint, notes=(*checkpoint.notes, note))
    return OpenedModel(model.to(device=device), TENSORS_ALONE, told, {})

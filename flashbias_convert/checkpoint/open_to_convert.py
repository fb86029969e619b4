"""How a checkpoint is opened: as a model, memory-mapped, or as the tensors of biases alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UnknownArchitectureError
from ..recipe import Recipe
from .architecture import ArchLike
from .bare import open_bare
from .mapped import MappedModel, NotMappable, open_mapped
from .open import OpenedModel, open_checkpoint, read_original
from .read import Checkpoint


def open_to_convert(
    source: Path,
    apart: bool,
    recipes: tuple[Recipe, ...],
    arch: ArchLike | None,
    arch_args: Mapping[str, Any] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    alone: bool,
    window: Sequence[int] | None,
) -> OpenedModel | MappedModel:
    """The model of a checkpoint; memory-mapped if it lies in shards and `apart` allows it.

    Where `alone` allows it and there is a window, or no known architecture has the tensors, it
    holds those of biases alone.
    """
    checkpoint, without_terms = read_original(source)
    if alone and window is not None:
        return open_bare(checkpoint, window=window, device=device, dtype=dtype)
    on_cpu = device is None or torch.device(device).type == "cpu"
    known: dict[str, Any] = {"arch": arch, "arch_args": arch_args, "dtype": dtype}
    try:
        if apart and on_cpu and checkpoint.weight_map is not None and not without_terms:
            try:
                return open_mapped(checkpoint, recipes=recipes, **known)
            except NotMappable as reason:
                note = f"all shards are held in memory at once: {reason}"
                checkpoint = dataclasses.replace(checkpoint, notes=(*checkpoint.notes, note))
        return open_checkpoint(checkpoint, device=device, without_terms=without_terms, **known)
    except UnknownArchitectureError as error:
        if not alone:
            raise
        return _without_model(checkpoint, device, dtype, error)


def _without_model(
    checkpoint: Checkpoint,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    unknown: UnknownArchitectureError,
) -> OpenedModel:
    if unknown.candidates:  # the user can say which
        hint = f"{unknown.hint}; or --window SIZE, to look at the tensors alone"
        raise UnknownArchitectureError(unknown.args[0], hint, unknown.candidates) from unknown
    try:
        return open_bare(checkpoint, device=device, dtype=dtype)
    except UnknownArchitectureError:
        raise unknown from None

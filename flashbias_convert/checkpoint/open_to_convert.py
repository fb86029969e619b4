"""How a checkpoint is opened: as a model, memory-mapped, or as the tensors of biases alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UnknownArchitectureError
from ..recipe import Recipe
from .architecture import ArchLike
from .bare import open_bare
from .mapped import MappedModel, NotMappable, open_mapped, sparing
from .open import OpenedModel, compute_dtype, open_checkpoint, read_original
from .read import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """Why the shards of a checkpoint are in memory at once, and what that takes.

    Attributes:
        reason: why, in words.
        model_bytes: of the weights in the dtype to compute in, which are allocated.
        file_bytes: of the weights in the files, which are mapped as they are read and written.
        dtype: to compute in.
    """

    reason: str
    model_bytes: int
    file_bytes: int
    dtype: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, reason: str) -> Held:
        """For a checkpoint of which no tensor was read yet."""
        tensors = checkpoint.tensors.values()
        wide = [t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors]
        name = str(dtype).removeprefix("torch.")
        return cls(reason, sum(wide), sum(t.nbytes for t in tensors), name)

    def __str__(self) -> str:
        return (
            f"all shards are held in memory at once: {self.reason}; about "
            f"{_gigabytes(self.model_bytes)} for the model in {self.dtype}, and up to three times "
            f"the {_gigabytes(self.file_bytes)} of its files"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def open_to_convert(
    source: Path,
    together: str | None,
    recipes: tuple[Recipe, ...],
    arch: ArchLike | None,
    arch_args: Mapping[str, Any] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    alone: bool,
    window: Sequence[int] | None,
) -> tuple[OpenedModel | MappedModel, Held | None]:
    """The model of a checkpoint; memory-mapped if it lies in shards and nothing stands against it.

    Where `alone` allows it and there is a window, or no known architecture has the tensors, it
    holds those of biases alone.

    Args:
        together: why shards have to be in memory at once, as far as the caller knows.

    Returns:
        The model, and why all shards are in memory, if so. This is told as a warning, too, before
        they are: memory may not suffice.
    """
    checkpoint, without_terms = read_original(source)
    if alone and window is not None:
        return open_bare(checkpoint, window=window, device=device, dtype=dtype), None
    if device is not None and torch.device(device).type != "cpu":
        together = together or f"biases are decomposed on {device}"
    if without_terms:
        together = together or "stale terms are taken out of its files"
    known: dict[str, Any] = {"arch": arch, "arch_args": arch_args, "dtype": dtype}
    held = None
    try:
        if checkpoint.weight_map is not None:
            if together is None:
                try:
                    with sparing(checkpoint):
                        return open_mapped(checkpoint, recipes=recipes, **known), None
                except NotMappable as reason:
                    together = str(reason)
            held = Held.of(checkpoint, dtype or compute_dtype(checkpoint.tensors), together)
            logger.warning("%s", held)
        return open_checkpoint(
            checkpoint, device=device, without_terms=without_terms, **known
        ), held
    except UnknownArchitectureError as error:
        if not alone:
            raise
        return _without_model(checkpoint, device, dtype, error), None


def _without_model(
    checkpoint: Checkpoint,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    unknown: UnknownArchitectureError,
) -> OpenedModel:
    if unknown.candidates:  # the user can say which
        hint = f"{unknown.hint}; or inspect --window SIZE, to look at the tensors alone"
        raise UnknownArchitectureError(unknown.args[0], hint, unknown.candidates) from unknown
    try:
        return open_bare(checkpoint, device=device, dtype=dtype)
    except UnknownArchitectureError:
        raise unknown from None

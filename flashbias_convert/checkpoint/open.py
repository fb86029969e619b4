"""From a checkpoint to a model with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .align import align
from .architecture import Architecture, ArchLike
from .from_transformers import in_stored_dtypes, load_pretrained
from .header import plan_of
from .identify import identify
from .kept_terms import split_terms, stale_sites
from .limits import build_from_file, check_size
from .read import Checkpoint, read_checkpoint


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model with the weights of a checkpoint.

    Attributes:
        model: in evaluation mode.
        architecture: what it was built from.
        checkpoint: what was read.
        stored: the weights under the model's keys, in the dtypes of the file.
    """

    model: nn.Module
    architecture: Architecture
    checkpoint: Checkpoint
    stored: dict[str, Tensor]


def open_model(
    path: str | Path,
    *,
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> OpenedModel:
    """Read a checkpoint that was not converted yet, and build its model.

    Args:
        path: a file, an index of shards, or a folder.
        arch: the architecture, if the checkpoint does not tell it.
        arch_args: keyword arguments for building it.
        device: where the model goes; default the CPU.
        dtype: in which it computes; default float32 (float64 if the file holds float64). Values
            of half precision are exact in it.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe, converted already, or does not fit.
        UnknownArchitectureError: the architecture is unknown or ambiguous.
    """
    checkpoint, without_terms = read_original(path)
    return open_checkpoint(
        checkpoint,
        arch=arch,
        arch_args=arch_args,
        device=device,
        dtype=dtype,
        without_terms=without_terms,
    )


def read_original(path: str | Path) -> tuple[Checkpoint, bool]:
    """Read a checkpoint that was not converted yet.

    Returns:
        The checkpoint, and whether stale terms were taken out of it, which its files still hold.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe or converted already.
    """
    checkpoint = read_checkpoint(path)
    weights, terms = split_terms(checkpoint.tensors)
    if plan_of(checkpoint.metadata) is not None or (terms and not stale_sites(terms)):
        raise CheckpointError(
            f"{path} was converted already", "load it with flashbias_convert.load_model"
        )
    if terms:
        note = f"the terms of {len(stale_sites(terms))} sites are stale and are made anew"
        checkpoint = replace(checkpoint, tensors=weights, notes=(*checkpoint.notes, note))
    return checkpoint, bool(terms)


def open_checkpoint(
    checkpoint: Checkpoint,
    *,
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    without_terms: bool = False,
) -> OpenedModel:
    """Build the model of a checkpoint that was read.

    Args:
        checkpoint: what was read; its tensors are the weights of an original model.
        arch, arch_args, device, dtype: see `open_model`.
        without_terms: terms were taken out of `checkpoint`, which its files still hold.
    """
    architecture = identify(checkpoint, arch, arch_args)
    computes = dtype or compute_dtype(checkpoint.tensors)
    folder = pretrained_folder(checkpoint, architecture)
    if folder is not None:
        check_size(architecture, checkpoint)
        # transformers reads the files by itself, but knows no prefixes of wrappers (`module.`)
        wrapped = any(key != name for key, name in checkpoint.names.items())
        own = checkpoint.tensors if without_terms or wrapped else None
        model = load_pretrained(architecture, folder, computes, own)
        stored = in_stored_dtypes(model, checkpoint.tensors)
    else:
        model = build_from_file(architecture, checkpoint).to(dtype=computes)
        stored = align(checkpoint.tensors, model)
        model.load_state_dict(stored, strict=True)
    return OpenedModel(model.to(device=device), architecture, checkpoint, stored)


def compute_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """float32, or float64 for weights that float32 would round."""
    wide = any(t.dtype == torch.float64 for t in tensors.values())
    return torch.float64 if wide else torch.float32


def pretrained_folder(checkpoint: Checkpoint, arch: Architecture) -> Path | None:
    """The folder that transformers can load by itself, or None."""
    whole = checkpoint.path.is_dir() or checkpoint.files[0].name == "model.safetensors"
    has_config = checkpoint.config is not None and "model_type" in checkpoint.config
    return checkpoint.folder if arch.library == "transformers" and whole and has_config else None

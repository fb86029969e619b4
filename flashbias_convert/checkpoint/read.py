"""From bytes to tensors: lazily, and never running code from a file."""

from __future__ import annotations

import argparse
import logging
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .archive import check_legacy, read_archive
from .files import WeightFiles, check_inside, find_weight_files, read_json
from .unwrap import strip_lightning, strip_prefixes, unwrap

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: what was asked for: a file, an index or a folder.
        tensors: the state dict; memory-mapped where the format allows it, so that reading costs
            nothing until a tensor is used.
        files: the files that hold the tensors.
        folder: the folder that the files lie in.
        metadata: metadata in the header of a safetensors file.
        extras: what a training checkpoint holds beside its weights.
        config: the content of ``config.json`` in the folder, if there is one.
        notes: what the user should know about how the file was read.
    """

    path: Path
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    folder: Path
    metadata: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint: ``.safetensors .ckpt .pt .pth .bin``, an index of shards, or a folder.

    Pickled files are read with ``weights_only=True``, always.

    Raises:
        CheckpointError: missing, damaged, unsafe, without tensors, or with a shard missing.
    """
    path = Path(path)
    found = find_weight_files(path)
    tensors, metadata, extras, notes = _read_all(found)
    tensors = strip_prefixes(strip_lightning(strip_prefixes(tensors), extras))
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    config = found.folder / "config.json"
    if config.is_file():
        check_inside(config, found.folder)
    return Checkpoint(
        path=path,
        tensors=tensors,
        files=found.files,
        folder=found.folder,
        metadata=metadata,
        extras=extras,
        config=read_json(config) if config.is_file() else None,
        notes=tuple(notes),
    )


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file (or of the one in a folder).

    Files of other formats have none. No tensor is read.

    Raises:
        CheckpointError: missing or damaged.
    """
    first = find_weight_files(Path(path)).files[0]
    if _format(first) != "safetensors":
        return {}
    try:
        with safe_open(first, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _damaged(first, error) from error


_Parts = tuple[dict[str, Tensor], dict[str, str], dict[str, Any], list[str]]


def _read_all(found: WeightFiles) -> _Parts:
    if found.weight_map is None:
        return _read_file(found.files[0])
    tensors: dict[str, Tensor] = {}
    for file in found.files:
        shard, _, _, _ = _read_file(file)
        wanted = [key for key, where in found.weight_map.items() if where == file]
        _require_keys(wanted, shard, file)
        tensors.update({key: shard[key] for key in wanted})
    return tensors, {}, {}, []


def _require_keys(keys: Iterable[str], shard: dict[str, Tensor], file: Path) -> None:
    missing = [key for key in keys if key not in shard]
    if missing:
        raise CheckpointError(
            f"{file.name} lacks {len(missing)} tensors that the index lists, such as {missing[0]!r}"
        )


def _read_file(path: Path) -> _Parts:
    if _format(path) == "safetensors":
        tensors, metadata = _read_safetensors(path)
        return tensors, metadata, {}, []
    tensors, extras, notes = _read_pickle(path)
    return tensors, {}, extras, notes


def _format(path: Path) -> str:
    """ "safetensors" or "torch", from the first bytes; the suffix may be wrong."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise CheckpointError(f"{path} is empty")
    if head.startswith(b"PK"):
        return "torch"
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(b"\x80"):
        return "torch"
    raise CheckpointError(
        f"{path} is neither a safetensors file nor one of torch.save",
        "known suffixes are .safetensors .ckpt .pt .pth .bin",
    )


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            # these tensors are views of a private memory map: no byte is read here
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise _damaged(path, error) from error


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """See `unwrap`. Memory-mapped where the file is whole and holds its tensors as they are."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if not is_archive:
        check_legacy(path)
        return unwrap(_torch_load(path, mapped=False))
    archive = read_archive(path)
    if not archive.compressed:
        found = unwrap(_torch_load(path, mapped=True))
        if archive.holds(found[0].values()):
            return found
    logger.debug("%s cannot be memory-mapped", path)
    return unwrap(_torch_load(path, mapped=False))


def _torch_load(path: Path, mapped: bool) -> Any:
    # timm's training checkpoints hold an argparse.Namespace, which runs no code
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise _unsafe(path, error) from error
        # the readers of a damaged archive raise nearly everything
        except Exception as error:
            raise _damaged(path, error) from error


def _unsafe(path: Path, error: Exception) -> CheckpointError:
    # torch advises to load it all the same, in many lines
    names = re.findall(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) or names
    except Exception:  # only says more about an error that is raised anyway
        logger.debug("the globals of %s cannot be listed", path, exc_info=True)
    if not names:
        reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        return _damaged(path, ValueError(reason))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return CheckpointError(
        f"{path} holds Python objects that could run code ({shown}); nothing was loaded",
        "where you trust it, load it yourself and save model.state_dict()",
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(f"{path} is damaged or not a checkpoint: {lines[0][:200]}")

"""``.mdlus`` files of NVIDIA PhysicsNeMo: an archive with weights, and arguments as JSON."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .pickles import damaged, read_pickle

_WEIGHTS, _ARGUMENTS = "model.pt", "args.json"


def is_mdlus(path: Path) -> bool:
    """Whether a file is an archive with ``model.pt`` and ``args.json`` at its top."""
    try:
        return {_WEIGHTS, _ARGUMENTS} <= set(_names(path))
    except Exception:  # damaged archives raise nearly everything; another reader says so
        return False


def read_mdlus(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """The weights, the arguments and notes of a ``.mdlus`` file, as data: no class is imported.

    Returns:
        The state dict; ``{"__name__", "__module__", "__args__"}`` of the class that was saved; and
        notes for the user.

    Raises:
        CheckpointError: damaged, or unsafe.
    """
    try:
        weights = io.BytesIO(_member(path, _WEIGHTS))
        arguments = json.loads(_member(path, _ARGUMENTS))
    except CheckpointError:
        raise
    except Exception as error:  # as above
        raise damaged(path, error) from error
    content, notes = read_pickle(path, weights)
    if not isinstance(content, dict) or not isinstance(arguments, dict):
        raise CheckpointError(f"{path} holds no state dict with arguments")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    # an empty buffer that older versions saved and newer ones ignore
    tensors = {key: t for key, t in tensors.items() if t.numel() or not _is_probe(key)}
    return tensors, arguments, [*notes, f"saved by {saved_class(arguments)}"]


def saved_class(arguments: dict[str, Any]) -> str:
    """``package.module.Class`` of the model in a ``.mdlus`` file."""
    return f"{arguments.get('__module__')}.{arguments.get('__name__')}"


def _is_probe(key: str) -> bool:
    return key.rpartition(".")[2] == "device_buffer"


def _names(path: Path) -> list[str]:
    # first tar: at its end it may look like the zip archive that it holds
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            return archive.getnames()
    with zipfile.ZipFile(path) as zipped:
        return zipped.namelist()


def _member(path: Path, name: str) -> bytes:
    """The content of one member; nothing is unpacked to disk."""
    limit = path.stat().st_size
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            file = archive.extractfile(name)
            if file is None:
                raise ValueError(f"{name} is no file")
            return file.read()
    with zipfile.ZipFile(path) as zipped:
        if zipped.getinfo(name).file_size > limit:  # these archives are never compressed
            raise ValueError(f"{name} is larger than its archive")
        return zipped.read(name)

"""From bytes to tensors: lazily, and never running code from a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .file_names import by_model_names
from .files import WeightFiles, check_inside, find_weight_files, read_json
from .header import linked_of, own_entries
from .mdlus import is_mdlus, read_mdlus
from .pangu_onnx import read_pangu_onnx
from .pickles import damaged, read_pickle
from .unused_tensors import split_unused
from .unwrap import strip_lightning, strip_prefixes, unwrap

#: how the text starts that a clone without Git LFS has instead of a large file
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: what was asked for: a file, an index or a folder.
        tensors: the state dict; memory-mapped where the format allows it, so that reading costs
            nothing until a tensor is used. Keys of converted files are those of the model.
        files: the files that hold the tensors.
        folder: the folder that the files lie in.
        metadata: metadata in the header of a safetensors file.
        extras: what a training checkpoint holds beside its weights.
        config: the content of ``config.json`` in the folder, if there is one.
        notes: what the user should know about how the file was read.
        names: key -> name of the tensor in its file, which may have a prefix, or be what the
            source of a conversion called it.
        weight_map: name of a tensor -> its file, where an index says it; None for one file.
        unused: what converted files hold beside weights and terms, by the names in them.
    """

    path: Path
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    folder: Path
    metadata: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, Path] | None = None
    unused: dict[str, Tensor] = field(default_factory=dict)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint: a file, an index of shards, or a folder.

    Files are safetensors, what `torch.save` writes (``.ckpt .pt .pth .bin``) and ``.mdlus``; their
    first bytes decide. Of ``.onnx`` files only those of Pangu-Weather are read. Pickled files are
    read with ``weights_only=True``, always.

    Raises:
        CheckpointError: missing, damaged, unsafe, without tensors, or with a shard missing.
    """
    path = Path(path)
    found = find_weight_files(path)
    tensors, metadata, extras, notes = _read_all(found)
    tensors, unused = split_unused(tensors, metadata)
    in_file = list(tensors)
    tensors = by_model_names(tensors, metadata)
    tensors = strip_prefixes(strip_lightning(strip_prefixes(tensors), extras))
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors", "; ".join(notes))
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
        names=dict(zip(tensors, in_file, strict=True)),  # renaming keeps the order
        weight_map=found.weight_map,
        unused=unused,
    )


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file, or of the first in a folder with a plan.

    Files of other formats have none. No tensor is read.

    Raises:
        CheckpointError: missing or damaged.
    """
    return metadata_of(find_weight_files(Path(path)).files)


def metadata_of(files: Iterable[Path]) -> dict[str, str]:
    """As `read_metadata`, of the files of one checkpoint."""
    first: dict[str, str] = {}
    for at, weights in enumerate(files):
        if _format(weights) != "safetensors":
            return {}
        try:
            with safe_open(weights, framework="pt") as file:
                found = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise damaged(weights, error) from error
        if own_entries(found):
            return found
        first = first if at else found
    return first


def read_file_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file of weights, such as a shard, under their names in it.

    Raises:
        CheckpointError: damaged or unsafe.
    """
    return _read_file(path)[0]


_Parts = tuple[dict[str, Tensor], dict[str, str], dict[str, Any], list[str]]


def _read_all(found: WeightFiles) -> _Parts:
    if found.weight_map is None:
        return _read_file(found.files[0])
    tensors: dict[str, Tensor] = {}
    headers: dict[Path, dict[str, str]] = {}
    notes: list[str] = []
    for file in found.files:
        shard, header, _, own_notes = _read_file(file)
        wanted = [key for key, where in found.weight_map.items() if where == file]
        _require_keys(wanted, shard, file)
        tensors.update({key: shard[key] for key in wanted})
        headers[file] = header
        notes += [note for note in own_notes if note not in notes]
    return tensors, _common(headers), {}, notes


def _common(headers: dict[Path, dict[str, str]]) -> dict[str, str]:
    """The header that all shards have, but for those that are the input's own files."""
    first = next((file for file, header in headers.items() if own_entries(header)), None)
    if first is None:
        return next((header for header in headers.values() if header), {})
    linked = linked_of(headers[first])
    for file, header in headers.items():
        if own_entries(header) != ({} if file.name in linked else own_entries(headers[first])):
            raise CheckpointError(
                f"{file.name} and {first.name} are of different conversions",
                "convert the original again",
            )
    return headers[first]


def _require_keys(keys: Iterable[str], shard: dict[str, Tensor], file: Path) -> None:
    missing = [key for key in keys if key not in shard]
    if missing:
        raise CheckpointError(
            f"{file.name} lacks {len(missing)} tensors that the index lists, such as {missing[0]!r}"
        )


def _read_file(path: Path) -> _Parts:
    kind = _format(path)
    if kind == "safetensors":
        tensors, metadata = _read_safetensors(path)
        return tensors, metadata, {}, []
    if kind == "mdlus":
        tensors, extras, notes = read_mdlus(path)
        return tensors, {}, extras, notes
    if kind == "onnx":
        tensors, notes = read_pangu_onnx(path)
        return tensors, {}, {}, notes
    content, read_notes = read_pickle(path)
    tensors, extras, notes = unwrap(content)
    return tensors, {}, extras, notes + read_notes


def _format(path: Path) -> str:
    """ "safetensors", "torch", "mdlus" or "onnx"; from the content, as suffixes may be wrong."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise CheckpointError(f"{path} is empty")
    if head == _LFS:
        raise CheckpointError(
            f"{path} holds no weights, only what Git LFS left in their place",
            "fetch the file itself: git lfs pull",
        )
    if head.startswith(b"PK"):
        return "mdlus" if is_mdlus(path) else "torch"
    if path.suffix == ".onnx":  # its first bytes do not tell it
        return "onnx"
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(b"\x80"):
        return "torch"
    if is_mdlus(path):
        return "mdlus"
    raise CheckpointError(
        f"{path} is neither a safetensors file nor one of torch.save",
        "known suffixes are .safetensors .ckpt .pt .pth .bin .mdlus .onnx",
    )


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            # these tensors are views of a private memory map: no byte is read here
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise damaged(path, error) from error

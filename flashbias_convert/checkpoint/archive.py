"""What a file of torch.save says of itself, looked at before anything in it is unpacked."""

from __future__ import annotations

import mmap
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError

#: torch never compresses; archives that were packed again may, within reason
_MOST_EXPANSION, _SMALL = 8, 64 * 2**20
#: the length of a record's own header before its name, and where it says how long names are
_LOCAL_HEADER, _NAME_LENGTH = 30, 26
#: names of what allocates as much as a number in the pickle says; weights need no such thing
_BYTE_ARRAYS = (b"builtins\nbytearray\n", b"__builtin__\nbytearray\n")
#: the directory of a damaged archive raises nearly everything
_DAMAGE = (zipfile.BadZipFile, RuntimeError, OSError, ValueError, LookupError, zlib.error)
_HINT = "where you trust it, load it yourself and save model.state_dict()"


@dataclass(frozen=True)
class Archive:
    """The records of an archive.

    Attributes:
        compressed: whether some are compressed, so that they cannot be mapped into memory.
        records: where each record starts in the file, and its bytes.
    """

    compressed: bool
    records: frozenset[tuple[int, int]]

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the memory of every tensor is one whole record.

        torch gives a mapped tensor the size that the pickle says, whatever the record holds.

        Args:
            tensors: from one memory map of this archive.
        """
        plain = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
        storages = [t.untyped_storage() for t in plain if t.device.type == "cpu"]
        found = {(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()}
        if not found:
            return True
        address, size = min(found)
        bases = (address - start for start, length in self.records if length == size)
        return any(all((a - base, s) in self.records for a, s in found) for base in bases)


def read_archive(path: Path) -> Archive:
    """The records of the archive at `path`; of what is in them, only the pickles are read.

    Raises:
        CheckpointError: damaged, or it would unpack to far more than its size, or allocate memory
            by a number in a pickle alone.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            _check_expansion(path, sum(entry.file_size for entry in entries))
            for entry in entries:
                archive.open(entry).close()  # compares the directory with the record's own header
            starts = [_start(file, entry) for entry in entries]
            for entry, start in zip(entries, starts, strict=True):
                if entry.filename.endswith(".pkl"):
                    _check_pickle(path, _content(file, entry, start))
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    sizes = (entry.file_size for entry in entries)
    return Archive(compressed, frozenset(zip(starts, sizes, strict=True)))


def _check_expansion(path: Path, unpacked: int) -> None:
    size = path.stat().st_size
    if unpacked > _MOST_EXPANSION * size + _SMALL:
        raise CheckpointError(f"{path} has {size} bytes and would unpack to {unpacked}", _HINT)


def _start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where the content of a record starts; its own header may differ from the directory."""
    file.seek(entry.header_offset + _NAME_LENGTH)
    lengths = file.read(4)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return entry.header_offset + _LOCAL_HEADER + name + extra


def _content(file: BinaryIO, entry: zipfile.ZipInfo, start: int) -> bytes:
    """What a record holds; its checksum is not looked at, for torch can leave it out."""
    file.seek(start)
    raw = file.read(entry.compress_size)
    if entry.compress_type == zipfile.ZIP_STORED:
        return raw
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, entry.file_size)


def check_legacy(path: Path) -> None:
    """Raise CheckpointError if a file of torch's older format allocates by a number alone."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_pickle(path, data)


def _check_pickle(path: Path, data: bytes | mmap.mmap) -> None:
    if any(data.find(name) >= 0 for name in _BYTE_ARRAYS):
        raise CheckpointError(f"{path} holds a bytearray; nothing was loaded", _HINT)

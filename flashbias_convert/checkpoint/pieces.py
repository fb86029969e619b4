"""Tensors as bytes in files: copied from one file to another without being held."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .read import read_file_tensors
from .weights import bytes_of

#: bytes that are held at a time
CHUNK = 2**20
#: how safetensors calls dtypes
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}

OnBytes = Callable[[int], None]


class ChangedInputError(CheckpointError):
    """A file of the input is not what it was when the conversion began."""


@dataclass(frozen=True)
class Piece:
    """A tensor that is copied from one file to another, and keeps its name.

    Attributes:
        name: in both.
        dtype: of both.
        shape: of both.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self, digest: str) -> str:
        """Dtype, shape and the hash of the bytes: what `origin.digest` is made of."""
        return f"{self.dtype} {list(self.shape)} {digest}"


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Wide dtypes first, as safetensors does it, so that every tensor lies aligned."""
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)


def can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor is one that `Piece` can stand for."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES


def header(pieces: Sequence[Piece], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file with these tensors, in this order, begins with.

    Always the same bytes, whereas safetensors itself writes `metadata` in any order.
    """
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        entries[piece.name] = {
            "dtype": _NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -- reading -------------------------------------------------------------------------------


class Source:
    """The tensors of one file of weights, as bytes.

    A safetensors file is read in chunks. What `torch.save` wrote is mapped into memory, and is
    unmapped when this object goes.

    Args:
        path: a file that `read_checkpoint` has read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ranges = _safetensors_ranges(path)
        self._tensors = {} if self._ranges is not None else read_file_tensors(path)

    def consists_of(self, pieces: Sequence[Piece]) -> bool:
        """Whether it is a safetensors file with these tensors, and no others."""
        return self._ranges is not None and {piece.name for piece in pieces} == set(self._ranges)

    def chunks(self, piece: Piece) -> Iterator[memoryview]:
        """The bytes of a tensor, some at a time; each is valid until the next one.

        Raises:
            ChangedInputError: the file is not what it was when it was first read.
        """
        if self._ranges is None:
            tensor = self._tensors.get(piece.name)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (piece.dtype, piece.shape):
                raise ChangedInputError(f"{self._path} has changed while it was converted")
            yield from _pieces_of(_view(tensor))
            return
        start, end = self._ranges.get(piece.name, (0, 0))
        if end - start != piece.nbytes:
            raise ChangedInputError(f"{self._path} has changed while it was converted")
        with self._path.open("rb") as file:
            yield from read_range(file, start, piece.nbytes)


class Held:
    """Tensors in memory, as `Source` has those of a file; `read` is called after each."""

    def __init__(self, tensors: Mapping[str, Tensor], read: Callable[[], None]) -> None:
        self._tensors, self._read = tensors, read

    def chunks(self, piece: Piece) -> Iterator[memoryview]:
        """The bytes of a tensor, some at a time."""
        yield from _pieces_of(_view(self._tensors[piece.name]))
        self._read()


def _view(tensor: Tensor) -> memoryview:
    array: Any = bytes_of(tensor).numpy()
    return memoryview(array)


def _pieces_of(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


def read_range(file: BinaryIO, start: int, size: int) -> Iterator[memoryview]:
    """`size` bytes of a file from `start` on, some at a time.

    Raises:
        ChangedInputError: the file ends before.
    """
    file.seek(start)
    buffer = memoryview(bytearray(min(size, CHUNK)))
    while size:
        got = file.readinto(buffer[: min(size, CHUNK)])  # type: ignore[attr-defined]
        if not got:
            raise ChangedInputError(f"{file.name} is shorter than it was")
        yield buffer[:got]
        size -= got


def _safetensors_ranges(path: Path) -> dict[str, tuple[int, int]] | None:
    """Where each tensor lies in the file; None for another format."""
    with path.open("rb") as file:
        head = file.read(9)
        if head[8:9] != b"{":
            return None
        length = int.from_bytes(head[:8], "little")
        file.seek(8)
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in entries.items()
    }


# -- hashing and writing -------------------------------------------------------------------


def digests_of(source: Source, pieces: Sequence[Piece], on_bytes: OnBytes) -> dict[str, str]:
    """A hash of every tensor, by its name."""
    return {piece.name: _hash(source.chunks(piece), on_bytes) for piece in pieces}


def holds(path: Path, start: int, source: Source | Held, pieces: Sequence[Piece]) -> bool:
    """Whether tensors lie in a file one after the other, from `start` to its end, byte for byte."""
    if path.stat().st_size != start + sum(piece.nbytes for piece in pieces):
        return False
    with path.open("rb") as file:
        _forget(file)
        file.seek(start)
        for piece in pieces:
            for meant in source.chunks(piece):
                if not _equal(file.read(len(meant)), meant):
                    return False
        _forget(file)
    return True


def _equal(a: bytes, b: memoryview) -> bool:
    # views compare byte by byte, arrays quickly
    return len(a) == len(b) and bool(
        (np.frombuffer(a, np.uint8) == np.frombuffer(b, np.uint8)).all()
    )


def copy_pieces(
    source: Source, pieces: Sequence[Piece], path: Path, start: int, on_bytes: OnBytes
) -> dict[str, str]:
    """Write tensors one after the other, from `start` on, and make them durable.

    Returns:
        A hash of every tensor, by its name.
    """
    found = {}
    with path.open("wb") as file:
        file.seek(start)
        for piece in pieces:
            found[piece.name] = _hash(source.chunks(piece), on_bytes, file.write)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        _forget(file)
    return found


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[], None],
) -> None:
    """Write a safetensors file; always the same bytes. `wrote` is called after each tensor."""
    pieces = in_file_order([Piece(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])
    with path.open("wb") as file:
        file.write(header(pieces, metadata))
        for piece in pieces:
            file.write(_view(tensors[piece.name]))
            wrote()


def write_header(path: Path, content: bytes) -> None:
    """Write the first bytes of a file that has room for them."""
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _hash(
    chunks: Iterator[memoryview],
    on_bytes: OnBytes,
    write: Callable[[memoryview], Any] | None = None,
) -> str:
    """A hash of `chunks`; each is written meanwhile."""
    value = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(1) as beside:
        for chunk in chunks:
            hashed = beside.submit(value.update, chunk)
            if write is not None:
                write(chunk)
            hashed.result()
            on_bytes(len(chunk))
    return value.hexdigest()


def _forget(file: BinaryIO) -> None:
    """Read it from the disk next time: what is still in memory proves nothing about the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

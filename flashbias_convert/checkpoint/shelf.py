"""Terms that wait in a file, and take no memory while other sites are planned."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from torch import Tensor

from ..term_tensors import lend
from ..terms import ScoreBias
from .allocator import give_back
from .weights import bytes_of

#: tensors begin at multiples of it
_ALIGNMENT = 64
#: terms of fewer bytes stay in memory
_SMALL = 2**16


class Shelf:
    """A file without a name, in which tensors of terms lie and from which they are memory-mapped.

    It goes with this process and with the last tensor, whatever ends them. Inside ``with``, patched
    modules take the tensors as they are; afterwards they are copied like all others.

    Args:
        folder: where there is space for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._maps: list[mmap.mmap] = []
        self._lent: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for tensor in self._lent:
            lend(tensor, False)
        self._lent = []

    def put(self, bias: ScoreBias) -> ScoreBias:
        """The same terms, in the file.

        Raises:
            OSError: the disk is full.
        """
        nbytes = sum(tensor.nbytes for _, tensor in bias.named_tensors())
        on_disk = nbytes >= _SMALL and bias.device.type == "cpu"
        found = self._stored(bias) if on_disk else bias
        give_back()
        return found

    def _stored(self, bias: ScoreBias) -> ScoreBias:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        start = _up(self._file.seek(0, 2), mmap.ALLOCATIONGRANULARITY)
        self._file.seek(start)
        places = [[self._write(t, start) for t in term.tensors().values()] for term in bias.terms]
        self._file.flush()
        size = self._file.tell() - start
        held = mmap.mmap(self._file.fileno(), size, offset=start)
        self._maps.append(held)
        terms = []
        for term, offsets in zip(bias.terms, places, strict=True):
            where = dict(zip(term.tensors(), offsets, strict=True))
            terms.append(term.map_tensors(partial(self._mapped, held, where)))
        return ScoreBias(tuple(terms), bias.num_heads)

    def _write(self, tensor: Tensor, start: int) -> int:
        """Append a tensor; where it lies, from `start` on."""
        assert self._file is not None
        at = self._file.seek(_up(self._file.tell(), _ALIGNMENT))
        self._file.write(memoryview(bytes_of(tensor).numpy()))  # type: ignore[arg-type]
        return at - start

    def _mapped(
        self, held: mmap.mmap, where: Mapping[str, int], name: str, tensor: Tensor
    ) -> Tensor:
        if not tensor.numel():
            return tensor
        flat = torch.frombuffer(held, dtype=tensor.dtype, count=tensor.numel(), offset=where[name])
        self._lent.append(lend(flat.view(tensor.shape)))
        return self._lent[-1]

    def forget(self) -> None:
        """Let go of the memory of what was read; it is read again where it is looked at."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for held in self._maps:
                held.madvise(mmap.MADV_DONTNEED)
        give_back()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step

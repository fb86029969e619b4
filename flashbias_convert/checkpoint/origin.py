"""How the source of a converted file called its tensors, so that it can be restored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import Tensor

from ..errors import CheckpointError
from .read import Checkpoint
from .weights import bytes_of, equal_bits

SOURCE_KEY = "flashbias_convert.source"
#: names of lost tensors that a note lists
_LISTED = 20


@dataclass(frozen=True)
class Origin:
    """What a converted file remembers of its source.

    Attributes:
        files: names of the files that held the weights.
        metadata: of the header, None where the source was no safetensors file or had none.
        renamed: name in the source -> name in the converted file, where they differ.
        omitted: names in the converted file that the source did not have.
        lost: names in the source whose values are not in the converted file.
        digest: of the tensors that can be restored, under their names in the source.
    """

    files: tuple[str, ...]
    metadata: dict[str, str] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    digest: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint, stored: Mapping[str, Tensor]) -> Self:
        """What to remember of a checkpoint whose tensors are stored under other names.

        Args:
            checkpoint: the source.
            stored: the tensors that the converted file will hold, by their names in it.
        """
        finder = _Finder(stored)
        found = {n: finder.name_of(n, t) for n, t in checkpoint.tensors.items()}
        names = {checkpoint.names[key]: value for key, value in found.items()}
        restored = {name: stored[key] for name, key in names.items() if key is not None}
        same = {name for name, key in names.items() if name == key}
        safetensors = checkpoint.files[0].suffix == ".safetensors"
        return cls(
            files=tuple(file.name for file in checkpoint.files),
            metadata=dict(checkpoint.metadata) if safetensors and checkpoint.metadata else None,
            renamed={n: k for n, k in names.items() if k is not None and n != k},
            omitted=tuple(key for key in stored if key not in same),
            lost=tuple(name for name, key in names.items() if key is None),
            digest=digest(restored),
        )

    def restore(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the source under their names in it.

        Args:
            tensors: what the converted file holds, by the names in it, without terms; tied names
                included.

        Raises:
            CheckpointError: a tensor is missing, or one was changed after the conversion.
        """
        names = {key: key for key in tensors if key not in self.omitted} | self.renamed
        missing = [key for key in names.values() if key not in tensors]
        if missing:
            raise CheckpointError(f"the converted file lacks {missing[0]}")
        restored = {name: tensors[key] for name, key in names.items()}
        if digest(restored) != self.digest:
            raise CheckpointError(
                "the weights in this file are not those that were converted: they were changed "
                "since, so the original cannot be restored from them"
            )
        return restored

    def to_json(self) -> str:
        """As text for a header."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`; raises CheckpointError for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            lists = {name: tuple(_texts(data[name])) for name in ("files", "omitted", "lost")}
            _texts(data["renamed"].items(), of=tuple)
            _texts((data["metadata"] or {}).items(), of=tuple)
            if not lists["files"]:
                raise ValueError("it had no files")
            return cls(**{**data, **lists})
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"what the file says of its source is damaged: {error}"
            ) from error


def _texts(values: Any, of: type[Any] = str) -> Iterable[Any]:
    """`values`, if they are texts, or pairs of texts; raises TypeError for anything else."""
    if isinstance(values, str):
        raise TypeError(f"{values[:20]!r} is no list")
    for value in values:
        if not isinstance(value, of) or not all(isinstance(part, str) for part in value):
            raise TypeError(f"{value!r} is no text")
    return values


def note_of_lost(lost: Sequence[str]) -> tuple[str, ...]:
    """What a user should know about `Origin.lost`: one sentence, or nothing if there are none."""
    return _note_of(lost, "left out of the output")


def note_of_unused(unused: Sequence[str]) -> tuple[str, ...]:
    """As `note_of_lost`, of what `unused_tensors` keeps."""
    return _note_of(unused, "copied, but not used")


def _note_of(names: Sequence[str], fate: str) -> tuple[str, ...]:
    if not names:
        return ()
    rest = len(names) - _LISTED
    listed = ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
    what = "tensor is no weight" if len(names) == 1 else "tensors are no weights"
    return (f"{len(names)} {what} of the model and {fate}: {listed}",)


class _Finder:
    """Finds a tensor of the source among stored ones: by name, by identity, then by value."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self._stored = stored
        self._by_identity = {id(stored[name]): name for name in reversed(list(stored))}
        self._by_value: dict[str, str] | None = None

    def name_of(self, name: str, tensor: Tensor) -> str | None:
        own = self._stored.get(name)
        if own is tensor or equal_bits(own, tensor):
            return name
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)]
        if self._by_value is None:  # only models that rename their tensors come here
            self._by_value = {
                _content(self._stored[name]): name for name in reversed(list(self._stored))
            }
        return self._by_value.get(_content(tensor))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash over names, dtypes, shapes and bytes."""
    return digest_of({name: _content(tensor) for name, tensor in tensors.items()})


def digest_of(contents: Mapping[str, str]) -> str:
    """The same from the text ``DTYPE SHAPE HASH`` of every tensor, see `Piece.describe`."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(contents):
        total.update(f"{name} {contents[name]}\n".encode())
    return total.hexdigest()


def _content(tensor: Tensor) -> str:
    value = hashlib.blake2b(bytes_of(tensor).numpy().data, digest_size=16)
    return f"{tensor.dtype} {list(tensor.shape)} {value.hexdigest()}"

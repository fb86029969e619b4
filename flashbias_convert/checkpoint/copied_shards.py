"""What is copied of the shards of a checkpoint, and the names that it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError
from .mapped import MappedModel
from .origin import Origin
from .pieces import Piece, in_file_order


@dataclass(frozen=True)
class Shard:
    """One file of the input, and what becomes of it."""

    source: Path
    name: str
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(piece.nbytes for piece in self.pieces)


def names_of(opened: MappedModel) -> dict[str, str]:
    """Name in the model -> name in the files, which keep it."""
    return {name: opened.checkpoint.names[key] for name, key in opened.sources.items()}


def unused_of(opened: MappedModel) -> list[str]:
    """Names in the files of what is copied, though the model has no name for it."""
    return [opened.checkpoint.names[key] for key in opened.unused]


def require_apart(names: Iterable[str], terms: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the index could not tell a tensor in the files from a term."""
    both = terms.keys() & set(names)
    if both:
        raise CheckpointError(
            f"a tensor in the files has the name of a term: {min(both)!r}", "give it another name"
        )


def shards_of(opened: MappedModel) -> list[Shard]:
    """The files that hold tensors, in order of their names, and all that they hold."""
    checkpoint = opened.checkpoint
    assert checkpoint.weight_map is not None
    pieces: dict[Path, list[Piece]] = {file: [] for file in checkpoint.files}
    for key in (*opened.sources.values(), *opened.unused):
        tensor, in_file = checkpoint.tensors[key], checkpoint.names[key]
        piece = Piece(in_file, tensor.dtype, tuple(tensor.shape))
        pieces[checkpoint.weight_map[in_file]].append(piece)
    used = sorted((file for file in checkpoint.files if pieces[file]), key=lambda file: file.name)
    return [
        Shard(file, f"model-{at:05d}-of-{len(used):05d}.safetensors", in_file_order(pieces[file]))
        for at, file in enumerate(used, 1)
    ]


def origin_of(opened: MappedModel) -> Origin:
    """As `Origin.of`, without the digest."""
    checkpoint = opened.checkpoint
    stored = {*names_of(opened).values(), *unused_of(opened)}
    safetensors = checkpoint.files[0].suffix == ".safetensors"
    return Origin(
        files=tuple(file.name for file in checkpoint.files),
        metadata=dict(sorted(checkpoint.metadata.items()))
        if safetensors and checkpoint.metadata
        else None,
        omitted=tuple(alias for alias in opened.tied if alias not in stored),
    )

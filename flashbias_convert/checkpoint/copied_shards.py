"""What is copied of the shards of a checkpoint, and the names that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError
from .mapped import MappedModel, lost_names
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


def require_apart(names: Mapping[str, str], terms: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the index could not tell a weight from a term."""
    both = names.keys() & terms.keys()
    if both:
        raise CheckpointError(
            f"a weight in the files has the name of a term: {min(both)!r}", "give it another name"
        )


def shards_of(opened: MappedModel) -> list[Shard]:
    """The files that hold weights of the model, in order of their names."""
    checkpoint = opened.checkpoint
    assert checkpoint.weight_map is not None
    pieces: dict[Path, list[Piece]] = {file: [] for file in checkpoint.files}
    for name, in_file in names_of(opened).items():
        tensor = checkpoint.tensors[opened.sources[name]]
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
    stored = set(names_of(opened).values())
    safetensors = checkpoint.files[0].suffix == ".safetensors"
    return Origin(
        files=tuple(file.name for file in checkpoint.files),
        metadata=dict(sorted(checkpoint.metadata.items()))
        if safetensors and checkpoint.metadata
        else None,
        omitted=tuple(alias for alias in opened.tied if alias not in stored),
        lost=lost_names(checkpoint, opened.sources),
    )

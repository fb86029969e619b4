"""Which tensor goes into which file of a folder, and the index that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .files import INDEX_SUFFIX
from .outputs import WEIGHTS_NAME


@dataclass(frozen=True)
class Split:
    """How tensors are spread over the files of a folder.

    Attributes:
        files: file name -> names of its tensors.
        total: bytes of all tensors.
    """

    files: dict[str, list[str]]
    total: int

    def write_index(self, folder: Path) -> None:
        """Write the index that transformers and `find_weight_files` read; none for one file."""
        if len(self.files) < 2:
            return
        where = {key: name for name, keys in self.files.items() for key in keys}
        index = {"metadata": {"total_size": self.total}, "weight_map": where}
        path = folder / (WEIGHTS_NAME + INDEX_SUFFIX)
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split(tensors: Mapping[str, Tensor], max_bytes: int) -> Split:
    """Spread tensors over files, in order.

    Args:
        tensors: tensors that share no memory.
        max_bytes: largest file; one tensor that is larger gets a file of its own.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    # without values: views of one memory map would count as one tensor
    sizes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    found = split_torch_state_dict_into_shards(
        sizes,
        filename_pattern=WEIGHTS_NAME.replace(".", "{suffix}."),
        max_shard_size=max_bytes,
    )
    return Split(dict(found.filename_to_tensors), int(found.metadata["total_size"]))

"""Checkpoints in shards that hold tensors which are no weights of their model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbias_convert.checkpoint import read_checkpoint

from ..models import ARGS, images
from ..sharded import write_shards
from .other_names import Made, transformers_swin

TABLE = "relative_position_bias_table"
TIMM: dict[str, Any] = {"arch": "timm:swin_tiny_patch4_window7_224", "arch_args": ARGS}


def _beside_tables(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the index beside every table, as releases of old had it, each another one."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found[key] = tensor
        if key.endswith(TABLE):
            index = torch.arange(len(found), len(found) + 256).reshape(16, 16)
            found[key.replace(TABLE, "relative_position_index")] = index
    return found


def old_swin_of_transformers(folder: Path, layout: str = "safetensors") -> Made:
    _, options, x = transformers_swin(folder)
    read = read_checkpoint(folder)
    tensors = {read.names[key]: tensor.clone() for key, tensor in read.tensors.items()}
    for path in folder.glob("model*"):
        path.unlink()
    more = {"extra.step": torch.tensor(7, dtype=torch.int32)}
    return write_shards(folder, {**more, **_beside_tables(tensors)}, layout, 4), options, x


def in_pickles(folder: Path) -> Made:
    return old_swin_of_transformers(folder, "bin")


def old_swin_of_timm(folder: Path) -> Made:
    import timm

    torch.manual_seed(0)
    name = str(TIMM["arch"]).removeprefix("timm:")
    tensors = _beside_tables(dict(timm.create_model(name, **ARGS).half().state_dict()))
    return write_shards(folder, tensors, "safetensors"), TIMM, images()


OLD: list[Callable[[Path], Made]] = [old_swin_of_transformers, in_pickles, old_swin_of_timm]

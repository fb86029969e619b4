"""What tests of conversions shard by shard share: a SwinV2 in three shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashbias_convert.checkpoint import convert_checkpoint

from ..models import ARGS, NAME, tiny_weights
from ..sharded import write_shards

LAYOUTS = ("safetensors", "bin")
TINY: dict[str, Any] = {"arch": f"timm:{NAME}", "arch_args": ARGS}
TERMS = "model-terms.safetensors"


def swin(folder: Path, layout: str = "safetensors", dtype: torch.dtype = torch.float16) -> Path:
    return write_shards(folder, tiny_weights(dtype), layout)


def convert(source: Path, output: Path, **options: Any) -> Path:
    done = convert_checkpoint(source, output, **{**TINY, **options})
    assert done.output == output
    assert (done.held is None) == ("max_shard_size" not in options)
    return output


def partial(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]

"""Checkpoints whose files have other names for the weights than the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashbias_convert.checkpoint import read_checkpoint

from ..models import images, tiny_weights
from ..sharded import write_bloom, write_shards
from .shards import TINY
from .test_renamed_by_transformers import ALL, write

#: the folder, how to convert it, and an input
Made = tuple[Path, dict[str, Any], Any]


def transformers_swin(folder: Path) -> Made:
    return write(folder, "Swin")[0], ALL, torch.randn(2, 3, 32, 32)


def transformers_beit(folder: Path) -> Made:
    return write(folder, "BEiT")[0], ALL, torch.randn(2, 3, 32, 32)


def without_prefix(folder: Path) -> Made:
    """A model with a head, tied to its embedding, in files that name the base model alone."""
    tensors = read_checkpoint(write_bloom(folder, "safetensors", 3, hidden_size=16)).tensors
    bare = {key.removeprefix("transformer."): t.clone() for key, t in tensors.items()}
    return write_shards(folder, bare, "safetensors"), {}, torch.arange(12)[None]


def with_prefix(folder: Path) -> Made:
    """A base model in files of one with a head."""
    source = write_bloom(folder, "safetensors", 3, hidden_size=16)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["BloomModel"]}))
    return source, {}, torch.arange(12)[None]


def of_a_wrapper(folder: Path, layout: str = "safetensors") -> Made:
    tensors = {f"module.{key}": t for key, t in tiny_weights(torch.float16).items()}
    return write_shards(folder, tensors, layout), TINY, images()


def of_a_wrapper_in_pickles(folder: Path) -> Made:
    return of_a_wrapper(folder, "bin")


def of_the_first_authors(folder: Path) -> Made:
    """Names that timm maps to its own."""
    tensors = {
        k.replace("head.fc.", "head.").replace("layers.1.downsample", "layers.0.downsample"): t
        for k, t in tiny_weights(torch.float16).items()
    }
    return write_shards(folder, tensors, "safetensors"), TINY, images()


MAKERS: list[Callable[[Path], Made]] = [
    transformers_swin, transformers_beit, without_prefix, with_prefix, of_a_wrapper,
    of_a_wrapper_in_pickles, of_the_first_authors,
]  # fmt: skip

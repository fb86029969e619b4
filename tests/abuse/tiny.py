"""The smallest real model, as a good checkpoint of every format."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashbias_convert.checkpoint import Conversion, convert_checkpoint
from flashbias_convert.options import DecomposeOptions

NAME = "swinv2_tiny_window8_256"
ARGS: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],  # the second block has a shift mask
    "num_heads": [1, 2],
    "window_size": 4,
    "num_classes": 5,
}
#: windows of 16 tokens would be left alone
OPTIONS = DecomposeOptions(force_all=True)


@functools.cache
def _weights() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = timm.create_model(NAME, **ARGS).state_dict()
    return {key: value.clone() for key, value in state.items()}


def weights() -> dict[str, Tensor]:
    """The state dict of the model, a copy."""
    return {key: value.clone() for key, value in _weights().items()}


def config() -> dict[str, Any]:
    """A ``config.json`` in the layout of timm."""
    args = {k: v for k, v in ARGS.items() if k != "num_classes"}
    return {"architecture": NAME, "num_classes": ARGS["num_classes"], "model_args": args}


def training_content() -> dict[str, Any]:
    """What timm's training script saves: the weights, and the options that made the model."""
    kwargs = {k: v for k, v in ARGS.items() if k not in ("img_size", "num_classes")}
    args = argparse.Namespace(
        model=NAME, img_size=ARGS["img_size"], num_classes=5, model_kwargs=kwargs
    )
    return {"epoch": 3, "arch": NAME, "state_dict": weights(), "args": args}


def images(side: int = 16) -> Tensor:
    """A batch for the model."""
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))


def convert(
    path: Path, output: Path | None = None, arch: str | None = None, **options: Any
) -> Conversion:
    """`convert_checkpoint` for this model."""
    args = ARGS if arch else None
    return convert_checkpoint(path, output, options=OPTIONS, arch=arch, arch_args=args, **options)


@dataclass(frozen=True)
class Good:
    """Good checkpoints; do not change them.

    Attributes:
        bare: a safetensors file without a word on its architecture.
        archive: a file of torch.save, which names its architecture.
        legacy: the same in torch's format of before 1.6.
        folder: ``config.json`` and ``model.safetensors``.
        shards: ``config.json``, an index, and two shards.
        converted: a converted file.
        converted_folder: a converted folder.
    """

    bare: Path
    archive: Path
    legacy: Path
    folder: Path
    shards: Path
    converted: Path
    converted_folder: Path

    @classmethod
    def make(cls, root: Path) -> Good:
        """Write them into `root`."""
        save_file(weights(), root / "bare.safetensors", metadata={"format": "pt"})
        torch.save(training_content(), root / "archive.pth")
        torch.save(training_content(), root / "legacy.ckpt", _use_new_zipfile_serialization=False)
        for name in ("folder", "shards"):
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config()))
        save_file(weights(), root / "folder" / "model.safetensors")
        _write_shards(root / "shards")
        converted = convert(root / "bare.safetensors", arch=f"timm:{NAME}").output
        converted_folder = convert(root / "folder").output
        assert converted is not None and converted_folder is not None
        return cls(
            root / "bare.safetensors",
            root / "archive.pth",
            root / "legacy.ckpt",
            root / "folder",
            root / "shards",
            converted,
            converted_folder,
        )


def _write_shards(folder: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(weights())}
    for name in names:
        part = {key: value for key, value in weights().items() if weight_map[key] == name}
        save_file(part, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

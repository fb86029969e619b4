"""Small checkpoints for tests of reading, writing and the command line."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.toy import BiasedAttention

NAME = "swinv2_tiny_window8_256"
ARGS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 8,
    "num_classes": 5,
}
ARCH = ["--arch", f"timm:{NAME}", "--arch-args", json.dumps(ARGS)]


@functools.cache
def _weights() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(NAME, **ARGS)
        for name, parameter in model.named_parameters():
            if "cpb_mlp" in name:  # at initialisation the bias is too small to matter
                parameter.data.mul_(4)
            if name.endswith(("norm1.weight", "norm2.weight")):  # zero: blocks would do nothing
                parameter.data.fill_(1)
    return {key: value.clone() for key, value in model.state_dict().items()}


def tiny_model() -> nn.Module:
    """A SwinV2 with three biased sites, always the same weights."""
    model = timm.create_model(NAME, **ARGS)
    model.load_state_dict(_weights())
    return model.eval()


def tiny_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of `tiny_model`, a copy."""
    return {key: value.to(dtype, copy=True) for key, value in _weights().items()}


def write_tiny(path: Path, dtype: torch.dtype = torch.float32, **changes: Tensor) -> Path:
    """The weights of `tiny_model` as a safetensors file, some of them replaced."""
    save_file({**tiny_weights(dtype), **changes}, path, metadata={"format": "pt"})
    return path


def write_tiny_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A folder in the layout of timm, with a file that no conversion needs."""
    folder.mkdir()
    write_tiny(folder / "model.safetensors", dtype)
    config = {
        "architecture": NAME,
        "num_classes": ARGS["num_classes"],
        "model_args": {k: v for k, v in ARGS.items() if k != "num_classes"},
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "url": "nowhere", "file": "/elsewhere"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("about this model")
    return folder


def images(batch: int = 2) -> Tensor:
    """A batch for `tiny_model`."""
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class TiedToy(nn.Module):
    """One biased attention, and two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = BiasedAttention()
        self.embed = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attn(self.embed(x)))
        return out

"""Sizes that a file names are compared with the file before anything of them is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint
from flashbias_convert.checkpoint.architecture import Architecture
from flashbias_convert.checkpoint.limits import build_from_file
from flashbias_convert.errors import CheckpointError

from .models import ARGS, NAME, write_tiny, write_tiny_folder
from .test_load import edited

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOO_LARGE = [
    ({"embed_dim": 2**18}, "far larger than the weights"),
    ({"embed_dim": 2**40}, "embed_dim is 1099511627776 in .*more than the weights"),
    ({"depths": [2**19, 2]}, "far larger|more than"),
    ({"depths": [2**20] * 1000}, "depths is 1048576000 in"),
    ({"img_size": 2**19}, "far larger than the weights"),
    ({"num_classes": 10**6}, "far larger than the weights"),
    ({"mlp_ratio": 1e6}, "far larger than the weights"),
]


def config_of(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        (config if name == "num_classes" else config["model_args"])[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("changes", "message"), TOO_LARGE)
def test_a_config_beside_other_weights(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    config_of(folder, changes)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(("changes", "message"), TOO_LARGE)
def test_a_plan_beside_other_weights(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = convert_checkpoint(path, arch=f"timm:{NAME}", arch_args=ARGS)
    assert done.output is not None

    def enlarge(plan: dict[str, Any]) -> None:
        plan["arch"]["args"].update(changes)

    with pytest.raises(CheckpointError, match=message):
        load_model(edited(done.output, tmp_path, enlarge))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_labels", 10**8),
        ("num_hidden_layers", 10**6),
        ("hidden_size", 2**30),
        ("n_layer", 9999),
    ],
)
def test_a_transformers_config_beside_other_weights(tmp_path: Path, name: str, value: int) -> None:
    config = {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 50,
        "hidden_size": 16, "n_layer": 1, "n_head": 2, name: value,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"more than the weights|far larger"):
        convert_checkpoint(tmp_path)


def test_what_the_caller_says_is_not_limited(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.zeros(1)}, path)
    arch = Architecture("caller", "f", factory=lambda: nn.Linear(2000, 2000))
    assert build_from_file(arch, read_checkpoint(path)).weight.numel() == 4_000_000
    named = Architecture("caller", "f", factory=lambda: nn.Linear(2000, 2000), origin="a file")
    with pytest.raises(CheckpointError, match="far larger"):
        build_from_file(named, read_checkpoint(path))


def test_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    config_of(folder, {"embed_dim": 2**18})
    with pytest.raises(CheckpointError):
        convert_checkpoint(folder)
    nn.Linear(3000, 3000)

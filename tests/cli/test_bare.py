"""``inspect`` of tensors that belong to no known model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoint.models import tiny_model

from .conftest import Cli
from .test_errors import assert_error

NAME = "blocks.3.attn"


def write_table(path: Path) -> Path:
    table = torch.randn(49, 2, generator=torch.Generator().manual_seed(0))
    save_file({f"{NAME}.relative_position_bias_table": table}, path)
    return path


def test_tables_need_no_model(cli: Cli, tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.safetensors")
    done = cli("inspect", path, "--html", tmp_path / "x.html", "--plot", tmp_path / "figures")
    assert done.code == 0 and "biases are made from tensors alone" in done.err
    assert NAME in done.out and "to convert it, say what it is: --arch" in done.out
    assert "heads of 0" not in (tmp_path / "x.html").read_text()
    assert (tmp_path / "figures" / f"{NAME}.energy.png").exists()
    data = cli("inspect", path, "--json").json()
    assert data["architecture"] == "tensors alone" and data["counts"] == {"patched": 1}


def test_tables_in_shards(cli: Cli, tmp_path: Path) -> None:
    names = {}
    for at in (1, 2):
        file, key = f"model-{at}.safetensors", f"blocks.{at}.attn.relative_position_bias_table"
        save_file({key: torch.randn(49, 2)}, tmp_path / file)
        names[key] = file
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = cli("inspect", tmp_path)
    assert done.code == 0 and "2 of 2 sites would be converted" in done.out


def test_a_window_is_what_swinv2_does_not_show(cli: Cli, tmp_path: Path) -> None:
    layers = {k: v for k, v in tiny_model().state_dict().items() if "cpb_mlp" in k}
    save_file(layers, tmp_path / "x.safetensors")
    without = cli("inspect", tmp_path / "x.safetensors")
    assert_error(without, 2, "no tensor of layers.0.blocks.0.attn shows its window", "--window 16")
    other = cli("convert", tmp_path / "x.safetensors", "--dry-run")  # it has no --window
    assert_error(
        other, 2, "no tensor of", "with --arch, or say which window: inspect FILE --window"
    )
    done = cli("inspect", tmp_path / "x.safetensors", "--window", "4", "--energy", "0.9")
    assert done.code == 0 and "3 of 3 sites would be converted" in done.out


def test_only_inspect_looks_at_tensors_alone(cli: Cli, tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.safetensors")
    assert_error(cli("convert", path), 2, "its tensors fit none that is known", "--arch")
    assert_error(cli("convert", path, "--dry-run", "--window", "4"), 2, "--window", "--help")
    both = cli("inspect", path, "--window", "4", "--arch", "pangu")
    assert_error(both, 2, "a window is for looking at tensors alone", "without an architecture")
    assert_error(cli("inspect", path, "--window", "x"), 2, "a window is a size such as 16", "see")


def test_nothing_that_looks_like_a_bias(cli: Cli, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    assert_error(cli("inspect", tmp_path / "x.safetensors"), 2, "fit none that is known", "--arch")
    done = cli("inspect", tmp_path / "x.safetensors", "--window", "4")
    assert_error(done, 2, "no tensor of", "--arch")

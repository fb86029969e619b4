"""``flashbias-convert convert`` and ``inspect``."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import load_model
from flashbias_convert.checkpoint import read_checkpoint, read_plan
from flashbias_convert.cli import main
from flashbias_convert.inspection import inspect_model
from flashbias_convert.plan import Plan
from tests.checkpoint.models import (
    ARCH,
    images,
    tiny_model,
    tiny_weights,
    write_tiny,
    write_tiny_folder,
)
from tests.checkpoint.sharded import write_bloom, write_shards

from .conftest import Cli

SITES = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]


def test_the_bare_form_in_a_process_of_its_own(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.ckpt", torch.float16)
    program = str(Path(sys.executable).with_name("flashbias-convert"))
    command = [program, "model.ckpt", "--energy", "0.99", *ARCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for site in SITES:
        assert site in done.stdout
    assert "3 of 3 sites converted" in done.stdout
    assert 'model = load_model("model.flashbias.safetensors")' in done.stdout
    loaded = load_model(tmp_path / "model.flashbias.safetensors")
    with torch.no_grad():
        error = (loaded(images()) - tiny_model()(images())).abs().max()
    assert 0 < error < 0.1


def test_a_folder_needs_no_options(cli: Cli, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    done = cli(folder)
    assert (done.code, done.err) == (0, "")
    assert f"{folder}: timm:swinv2_tiny_window8_256 (from {folder}/config.json)" in done.out
    assert len(read_plan(tmp_path / "m.flashbias").patched) == 3


def test_arguments_beside_the_weights_are_read_as_data(cli: Cli, tmp_path: Path) -> None:
    """torch.load refuses them by default; nothing of them is run here, so no option is needed."""
    content = {"model": tiny_weights(), "args": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pth")
    done = cli(tmp_path / "x.pth", *ARCH, "--json")
    assert (done.code, done.err) == (0, "note: took the weights from 'model'\n")
    assert done.json()["counts"] == {"patched": 3}


def test_json_is_one_object_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, "--json")
    assert (done.code, done.err) == (0, "")
    data = done.json()
    assert data["output"] == str(tmp_path / "x.flashbias.safetensors")
    assert data["counts"] == {"patched": 3} and data["exit_code"] == 0
    assert data["plan"] == read_plan(data["output"]).to_json()


def test_verbose_lists_the_reasons_at_any_width(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = write_tiny(tmp_path / "x.safetensors")
    assert f"{SITES[0]}: patched: " not in cli("inspect", path, *ARCH).out
    shown = cli("inspect", path, *ARCH, "-v").out
    assert all(f"{site}: patched: " in shown for site in SITES)


def test_quiet_says_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli(write_tiny(tmp_path / "x.safetensors"), *ARCH, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_options_reach_the_plan(cli: Cli, tmp_path: Path) -> None:
    path, output = write_tiny(tmp_path / "x.safetensors"), tmp_path / "out.safetensors"
    options = "--energy 0.9 --method svd --max-rank 12 --max-attention-error 0.5 --target h100"
    flags = ["--force-all", "--diagonal", "--dtype", "float64"]
    done = cli(path, *ARCH, "-o", output, *options.split(), *flags)
    assert done.code == 0, done.err
    saved = read_plan(output).options
    assert (saved.energy, saved.method, saved.max_rank) == (0.9, "svd", 12)
    assert (saved.max_attention_error, saved.target, saved.force_all) == (0.5, "h100", True)
    assert saved.diagonal is True
    assert (tmp_path / "out.plan.json").exists()


@pytest.mark.parametrize(
    ("held", "options", "used"),
    [
        (torch.float64, [], torch.float64),
        (torch.float64, ["--dtype", "float32"], torch.float32),
        (torch.float16, [], torch.float32),
    ],
)
def test_biases_are_computed_as_wide_as_the_file(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: torch.dtype,
    options: list[str],
    used: torch.dtype,
) -> None:
    seen: list[torch.dtype] = []

    def spy(model: torch.nn.Module, **choices: Any) -> Plan:
        seen.append(next(model.parameters()).dtype)
        return inspect_model(model, **choices)

    monkeypatch.setattr("flashbias_convert.inspection.inspect_model", spy)
    path = write_tiny(tmp_path / "x.safetensors", held)
    assert cli("inspect", path, *ARCH, *options).code == 0
    assert seen == [used]


def test_include_and_exclude_choose_sites(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, "--include", r"re:layers\.0\..*", "--exclude", SITES[1], "--json")
    status = {site["name"]: site["status"] for site in done.json()["plan"]["sites"]}
    assert status == {SITES[0]: "patched", SITES[1]: "left alone", SITES[2]: "left alone"}
    shown = cli("inspect", path, *ARCH, "--include", SITES[0]).out
    assert re.search(r"left alone: not among the included sites \[layers\.0.*, layers\.1", shown)
    assert "1 of 3 sites would be converted, 2 left alone" in shown


@pytest.mark.parametrize(
    ("how", "then"),
    [(["inspect"], "with the same options"), (["convert", "--dry-run"], "leave out --dry-run")],
)
def test_a_dry_run_writes_nothing(cli: Cli, tmp_path: Path, how: list[str], then: str) -> None:
    """And says how to go on: without these options the file would not be understood."""
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(*how, path, *ARCH)
    assert done.code == 0
    assert "3 of 3 sites would be converted" in done.out and "nothing was written" in done.out
    assert then in done.out
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_report_holds_everything(cli: Cli, tmp_path: Path) -> None:
    path, report = write_tiny(tmp_path / "x.safetensors"), tmp_path / "report.json"
    assert cli("inspect", path, *ARCH, "--report", report).code == 0
    data = json.loads(report.read_text())
    assert [site["name"] for site in data["plan"]["sites"]] == SITES
    assert all(site["decisions"] for site in data["plan"]["sites"])
    again = cli("inspect", path, *ARCH, "--report", report)
    assert again.code == 2 and "exists" in again.err
    report.write_text("old")
    assert cli("convert", path, *ARCH, "--dry-run", "--report", report, "--force").code == 0
    assert json.loads(report.read_text())["plan"] == data["plan"]
    assert {p.name for p in tmp_path.iterdir()} == {"x.safetensors", "report.json"}


def test_a_recipe_in_a_file_is_used(cli: Cli, tmp_path: Path) -> None:
    from tests.checkpoint.models import TiedToy

    torch.save(TiedToy().state_dict(), tmp_path / "x.pt")
    (tmp_path / "my_recipe.py").write_text("from tests.toy import TOY as recipe\n")
    arch = ["--arch", "tests.checkpoint.models:TiedToy"]
    without = cli(tmp_path / "x.pt", *arch)
    assert without.code == 3 and "no module of this model has a recipe" in without.err
    done = cli(tmp_path / "x.pt", *arch, "--recipe", tmp_path / "my_recipe.py", "--force-all")
    assert done.code == 0, done.err
    assert "from tests.checkpoint.models import TiedToy" in done.out
    given = f'arch=TiedToy, recipes=[load_recipe_file("{tmp_path / "my_recipe.py"}")])'
    assert "load_model(" in done.out and given in done.out


def test_the_exit_code_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flashbias-convert", "nowhere.pt"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1


def test_shards_from_the_command_line(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, "--max-shard-size", "100KB", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json()["output"] == str(tmp_path / "x.flashbias")
    assert len(list((tmp_path / "x.flashbias").glob("model-*-of-*.safetensors"))) > 1
    assert cli("show", tmp_path / "x.flashbias").code == 0
    report = tmp_path / "x.flashbias" / "report.json"
    inside = cli(path, *ARCH, "--max-shard-size", "1GB", "--force", "--report", report)
    assert inside.code == 2 and "would overwrite the output" in inside.err
    bad = cli(path, *ARCH, "--max-shard-size", "5")
    assert bad.code == 2 and "write for instance 5GB" in bad.err


def test_shards_that_are_held_in_memory_are_told(cli: Cli, tmp_path: Path) -> None:
    source = write_shards(tmp_path / "m", tiny_weights(), "safetensors")
    done = cli(source, *ARCH, "--max-shard-size", "1GB", "--json")
    (line,) = done.err.splitlines()
    assert done.code == 0 and "all shards are held in memory at once: another size" in line
    size = sum(t.nbytes for t in tiny_weights().values())
    held = done.json()["held_in_memory"]
    assert held["model_bytes"] == held["file_bytes"] == size and held["dtype"] == "float32"
    apart = cli(source, *ARCH, "--output", tmp_path / "apart", "--json")
    assert (apart.code, apart.err) == (0, "") and apart.json()["held_in_memory"] is None


def test_tensors_that_are_no_weights_are_named(cli: Cli, tmp_path: Path) -> None:
    source = write_bloom(tmp_path / "m", "safetensors", 2, hidden_size=16)
    tensors = {key: t.clone() for key, t in read_checkpoint(source).tensors.items()}
    write_shards(source, {**tensors, "foo": torch.ones(3)}, "safetensors", 2)
    told = "1 tensor is no weight of the model and"
    note = f"{told} copied, but not used: foo"
    done = cli(source, "--json")
    assert (done.code, done.err) == (0, f"note: {note}\n") and done.json()["notes"] == [note]
    done = cli(source, "--max-shard-size", "1GB", "--force", "--json")
    assert done.code == 0 and done.json()["notes"] == [f"{told} left out of the output: foo"]


def test_calibration_chooses_by_the_outputs(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    how = ["--calibration", "random", "--calibration-samples", "2", "--max-output-error", "0.05"]
    done = cli(path, *ARCH, *how, "--json")
    assert done.code == 0, done.err
    plan = done.json()["plan"]
    assert plan["options"]["max_output_error"] == 0.05
    assert all("calibrated" in site["reason"] for site in plan["sites"])
    assert load_model(tmp_path / "x.flashbias.safetensors") is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-output-error", "0.1"], "add --calibration"),
        (["--calibration", "random", "--max-output-error", "nan"], "max_output_error"),
        (["--calibration", "random", "--calibration-samples", "0"], "at least 1"),
        (["--calibration", "nowhere"], "there are no inputs nowhere"),
        (["--calibration", "random", "--energy", "0.9"], "and not by --energy"),
        (
            ["--calibration", "random", "--max-attention-error", "0.1"],
            "and not by --max-attention-error",
        ),
    ],
)
def test_calibration_that_makes_no_sense(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, *arguments)
    assert done.code == 2 and message in done.err
    assert not list(tmp_path.glob("*.flashbias*"))

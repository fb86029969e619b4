"""``--config FILE.toml``."""

from __future__ import annotations

import re
import tomllib
from inspect import signature
from pathlib import Path

import pytest

from flashbias_convert.checkpoint import read_plan
from flashbias_convert.cli.convert import convert
from tests.checkpoint.models import ARCH, ARGS, NAME, write_tiny

from .conftest import Cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "convert.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "convert.toml"
    path.write_text(text)
    return path


def test_options_come_from_the_file_and_the_command_line_wins(cli: Cli, tmp_path: Path) -> None:
    args = "\n".join(f"{key} = {value!r}" for key, value in ARGS.items())
    config = write(
        tmp_path,
        "energy = 0.9\nmax-rank = 12\nfill = false\nmethod = 'svd'\n"
        f"exclude = ['re:layers.1.*']\narch = 'timm:{NAME}'\n[arch_args]\n{args}\n",
    )
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, "--config", config, "--max-rank", 8)
    assert done.code == 0, done.err
    plan = read_plan(tmp_path / "x.flashbias.safetensors")
    found = plan.options
    assert (found.energy, found.max_rank, found.fill, found.method) == (0.9, 8, False, "svd")
    assert plan.counts() == {"patched": 2, "left alone": 1}


def test_an_option_given_again_replaces_the_list_of_the_file(cli: Cli, tmp_path: Path) -> None:
    config = write(tmp_path, "include = ['layers.0.blocks.0.attn']")
    path = write_tiny(tmp_path / "x.safetensors")
    options = ["--config", config, "--include", "layers.1.blocks.0.attn", "--json"]
    sites = cli("inspect", path, *ARCH, *options).json()["plan"]["sites"]
    assert [s["name"] for s in sites if s["status"] == "patched"] == ["layers.1.blocks.0.attn"]


def test_inspect_takes_the_same_file(cli: Cli, tmp_path: Path) -> None:
    config = write(tmp_path, "output = 'x.safetensors'\nforce = true\nenergy = 0.5")
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli("inspect", path, *ARCH, "--config", config, "--json")
    assert done.code == 0, done.err
    assert done.json()["plan"]["options"]["energy"] == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enrgy = 0.9", "unknown option 'enrgy'.*did you mean energy"),
        ("checkpoint = 'x'", "unknown option 'checkpoint'"),
        ("config = 'x'", "unknown option 'config'"),
        ("[decompose]\nenergy = 0.9", "unknown option 'decompose'"),
        ("max-rank = 1\nmax_rank = 2", "option max_rank twice"),
        ("energy = ", "is not TOML"),
        ("energy = 'high'", "'--energy'"),
        ("energy = true", "energy .* must be a number or a string, got True"),
        ("energy = [0.9]", "energy .* must be a number or a string"),
        ("energy = 3.0", r"energy must be in \(0, 1\]"),
        ("max_rank = 1.5", "'--max-rank'"),
        ("fill = 'no'", "fill .* must be true or false, got 'no'"),
        ("include = 'x'", "include .* must be a list of strings"),
        ("include = [1]", "include .* must be a list of strings"),
        ("arch_args = [1]", "arch_args .* must be a number or a string"),
        ("method = 'magic'", "'--method'"),
    ],
)
def test_what_makes_no_sense_is_one_line(cli: Cli, tmp_path: Path, text: str, message: str) -> None:
    done = cli("nothing.pt", "--config", write(tmp_path, text))
    assert (done.code, done.out) == (2, "")
    assert re.search(message, done.err.replace("\n", " ")), done.err
    assert len(done.err.splitlines()) <= 2


def test_a_saved_plan_says_options_and_architecture(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert cli(path, *ARCH, "--energy", 0.9, "--no-fill", "--method", "svd").code == 0
    done = cli("inspect", path, "--config", tmp_path / "x.flashbias.plan.json", "--json")
    assert done.code == 0, done.err
    found, wanted = done.json()["plan"], read_plan(tmp_path / "x.flashbias.safetensors").to_json()
    assert found["options"] == wanted["options"] and found["options"]["fill"] is False
    assert found["arch"] == wanted["arch"]
    assert [s["decisions"] for s in found["sites"]] == [s["decisions"] for s in wanted["sites"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not the plan of a conversion"),
        ('{"energy": 0.9}', "is not the plan of a conversion"),
        ('{"format": "flashbias-convert plan"}', "says no options"),
        ('{"format": "flashbias-convert plan", "options": {"a": 1}}', "unknown option 'a'"),
    ],
)
def test_other_json_is_one_line(cli: Cli, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    done = cli("nothing.pt", "--config", tmp_path / "x.json")
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) <= 2


def test_a_missing_file_is_one_line(cli: Cli, tmp_path: Path) -> None:
    done = cli("nothing.pt", "--config", tmp_path / "no.toml")
    assert done.code == 2 and "no.toml cannot be read: No such file" in done.err


def test_the_example_is_understood(cli: Cli) -> None:
    data = tomllib.loads(EXAMPLE.read_text())
    assert set(data) < set(signature(convert).parameters)
    example = EXAMPLE.parent / "swinv2_cifar10"
    done = cli("inspect", example, "--config", EXAMPLE, "--json")  # as its first lines say
    assert done.code == 0, done.err
    plan = done.json()["plan"]
    assert plan["options"]["energy"] == data["energy"] == 0.99
    assert done.json()["counts"] == {"patched": 6, "left alone": 4}

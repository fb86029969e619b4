"""The program around its commands: starting, helping, and the command that may be left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashbias_convert import __version__
from flashbias_convert.cli.app import COMMANDS, _with_command

from .conftest import Cli


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["--version"], []])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom flashbias_convert.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "print('LOADED', *({'torch', 'timm', 'transformers', 'numpy'} & sys.modules.keys()))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_a_bad_option_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom flashbias_convert.cli.app import run\n"
        "assert run(['x.pt', '--energy', '2']) == 2\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_the_program_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "flashbias_convert", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"flashbias-convert {__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert done.code == 0 and done.err == ""
    assert "Exit codes" in done.out


def test_help_does_not_offer_what_does_not_work(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    shown = cli("convert", "--help").out
    assert "<auto|exact|svd>" in shown and "see the command fit" in " ".join(shown.split())
    assert "svd|neural" not in shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["m.ckpt", "--energy", "0.9"], ["convert", "m.ckpt", "--energy", "0.9"]),
        (["--energy", "0.9", "m.ckpt"], ["convert", "--energy", "0.9", "m.ckpt"]),
        (["./show"], ["convert", "./show"]),
        (["show", "x"], ["show", "x"]),
        (["--help"], ["--help"]),
        (["-h"], ["-h"]),
        (["--version"], ["--version"]),
        ([], ["--help"]),
    ],
)
def test_convert_may_be_left_out(given: list[str], meant: list[str]) -> None:
    assert _with_command(given) == meant


def test_a_mistyped_command_gets_a_suggestion(cli: Cli) -> None:
    for arguments in (["inspct", "x.pt"], ["reciepes"]):
        done = cli(*arguments)
        assert done.code != 0 and done.out == ""
        assert "hint: did you mean the command" in done.err


def test_an_unknown_option_is_one_line_and_a_hint(cli: Cli) -> None:
    done = cli("x.pt", "--enrgy", "0.9")
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: No such option: --enrgy") and "--energy" in lines[0]


def test_the_environment_is_tried_and_not_guessed(cli: Cli) -> None:
    trials = {
        t["backend"]: t for t in cli("env", "--json").json()["backends"] if t["device"] == "cpu"
    }
    assert trials["eager"]["works"] and trials["sdpa"]["works"]
    assert trials["triton"]["works"] or trials["triton"]["reason"]
    assert "backend eager on cpu: works" in cli("env").out

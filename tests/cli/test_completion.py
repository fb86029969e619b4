"""Completion: by the scripts that typer installs, with and without the command convert."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashbias_convert.cli.app import _OWN_OPTIONS, COMMANDS
from flashbias_convert.cli.completion import insert_default_command, is_completing

WORDS = (*COMMANDS, *_OWN_OPTIONS)
PROGRAM = Path(sys.executable).with_name("flashbias-convert")


@pytest.mark.parametrize(
    ("line", "position", "meant"),
    [
        ("p x.pt --en", 2, "p convert x.pt --en"),
        ("p\nx.pt\n--en", 2, "p\nconvert\nx.pt\n--en"),
        ("p --en", 1, "p convert --en"),
        ("p x.pt ", 2, "p convert x.pt "),
        ("p co", 1, "p co"),
        ("p show --js", 2, "p show --js"),
        ("p --version", 1, "p --version"),
        ("p ", 1, "p "),
        ("p", 1, "p"),
    ],
)
def test_where_the_command_is_inserted(line: str, position: int, meant: str) -> None:
    bash = {"COMP_WORDS": line, "COMP_CWORD": str(position)}
    insert_default_command("convert", WORDS, bash)
    assert bash["COMP_WORDS"] == meant
    assert int(bash["COMP_CWORD"]) == position + (meant != line)
    other = {"_TYPER_COMPLETE_ARGS": line}
    insert_default_command("convert", WORDS, other)
    assert other == {"_TYPER_COMPLETE_ARGS": meant}


def test_only_a_shell_completes() -> None:
    assert is_completing("flashbias-convert", {"_FLASHBIAS_CONVERT_COMPLETE": "complete_bash"})
    assert not is_completing("flashbias-convert", {"COMP_WORDS": "x"})


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not installed here")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("flashbias-convert model.pt --max-s", ["--max-shard-size"]),
        ("flashbias-convert convert model.pt --max-s", ["--max-shard-size"]),
        ("flashbias-convert insp", ["inspect"]),
        ("flashbias-convert x.pt --method s", ["svd"]),
    ],
)
def test_bash_completes_with_the_script_that_is_installed(line: str, offered: list[str]) -> None:
    code = (
        f'export PATH="{PROGRAM.parent}:$PATH"\n'
        "source <(flashbias-convert --show-completion bash)\n"
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_flashbias_convert_completion flashbias-convert\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered

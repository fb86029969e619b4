"""Completion in shells, where the command ``convert`` may be left out as elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, MutableMapping

#: where the scripts that typer installs put the line: of bash; of zsh, fish and PowerShell
_BASH, _OTHERS = "COMP_WORDS", "_TYPER_COMPLETE_ARGS"
_BASH_POSITION = "COMP_CWORD"


def is_completing(program: str, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a shell asks how a line goes on, instead of running it."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE" in environment


def insert_default_command(
    default: str, others: Collection[str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Complete a line without a command as one that begins with `default`.

    Args:
        default: the command that may be left out.
        others: words that may stand in its place: commands, and options of the program itself.
        environment: what the shell passed; changed in place.
    """
    variable = _BASH if _BASH in environment else _OTHERS
    line = environment.get(variable, "")
    words = line.split()[1:]
    if not words or words[0] in others or (_is_at_first(words, line, environment)):
        return
    environment[variable] = re.sub(r"^(\s*\S+)(\s+)", rf"\1\2{default}\2", line, count=1)
    if variable == _BASH:
        environment[_BASH_POSITION] = str(int(environment[_BASH_POSITION]) + 1)


def _is_at_first(words: list[str], line: str, environment: MutableMapping[str, str]) -> bool:
    """Whether the word that is being typed may become a command or a file."""
    if words[0].startswith("-"):
        return False
    if _BASH in environment:
        return environment.get(_BASH_POSITION) == "1"
    return len(words) == 1 and not line.endswith(" ")

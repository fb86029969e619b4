"""``--config FILE``: options of a command from a file; those of the command line win.

The file is TOML, or the plan of an earlier conversion, whose options have the same names.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..options import PLAN_FORMAT

#: options that say how a program is run and not what it does
_NOT_IN_FILES = {"checkpoint", "config", "debug"}


def _apply(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of this call."""
    if path is not None and not ctx.resilient_parsing:
        own = {p.name: p for p in ctx.command.params}
        found = _read(path)
        ctx.default_map = {
            key: _checked(key, value, own[key], path) for key, value in found.items() if key in own
        }
    return path


ConfigOpt = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A .toml file with options, named as here: energy = 0.99, max_rank = 32; or the "
        ".plan.json of a conversion, to decide as that did. Options of the command line win.",
        show_default=False,
        is_eager=True,
        callback=_apply,
    ),
]


def _read(path: Path) -> dict[str, Any]:
    """The options in a file, by the names of the parameters of `convert`.

    `inspect` reads the same files and has no use for some of them.
    """
    from .convert import convert  # which has the option that is defined here

    is_plan = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if is_plan else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not {'JSON' if is_plan else 'TOML'}: {error}") from error
    data = _of_plan(data, path) if is_plan else data
    known = sorted(set(signature(convert).parameters) - _NOT_IN_FILES)
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise UsageError(f"{path} has an unknown option {key!r}", hint)
        if name in options:
            raise UsageError(f"{path} has the option {name} twice")
        options[name] = value
    return options


def _of_plan(plan: Any, path: Path) -> dict[str, Any]:
    """The options that a saved plan was made with, and what it says about the model."""
    if not isinstance(plan, dict) or plan.get("format") != PLAN_FORMAT:
        raise UsageError(f"{path} is not the plan of a conversion", "see --report, or use TOML")
    options, arch = plan.get("options"), plan.get("arch")
    if not isinstance(options, dict):
        raise UsageError(f"{path} says no options")
    found = {k: v for k, v in options.items() if v is not None and k != "version"}
    if isinstance(arch, dict) and arch.get("library") != "caller":
        library, name = arch.get("library"), arch.get("name")
        found["arch"] = name if library == "flashbias" else f"{library}:{name}"
        found["arch_args"] = arch.get("args", {})
    return found


def _checked(name: str, value: Any, parameter: Any, path: Path) -> Any:
    """A value as the command line would take it; raises UsageError for one of another kind."""
    if name == "arch_args" and isinstance(value, Mapping):
        return json.dumps(value)
    if getattr(parameter, "multiple", False):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise UsageError(f"{name} in {path} must be a list of strings, got {value!r}")
    is_flag = bool(getattr(parameter, "is_flag", False))
    if is_flag != isinstance(value, bool) or isinstance(value, list | dict):
        kind = "true or false" if is_flag else "a number or a string"
        raise UsageError(f"{name} in {path} must be {kind}, got {value!r}")
    # as text, because a parser that takes 1.5 for an integer would cut it
    return value if is_flag else str(value)

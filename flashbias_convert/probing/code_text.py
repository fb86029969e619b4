"""Lines of Python code, formatted as ruff would."""

from __future__ import annotations

import importlib.metadata
import inspect
import keyword
import re
import textwrap
from typing import Any

WIDTH = 100


def parameters_of(cls: type) -> list[str]:
    """The parameters of forward; all of them open where one has a default that is no literal."""
    anything = ["self", "*args: Any", "**kwargs: Any"]
    try:
        found = list(inspect.signature(cls.forward).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return anything
    if not found or found[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return anything
    written = ["self"]
    starred = False
    for parameter in found[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            written.append("*")
            starred = True
        one = _parameter(parameter)
        if one is None or keyword.iskeyword(parameter.name):
            return anything
        starred = starred or one.startswith("*")
        written.append(one)
    return written


def _parameter(parameter: inspect.Parameter) -> str | None:
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    text = f"{marks.get(parameter.kind, '')}{parameter.name}: Any"
    if parameter.default is inspect.Parameter.empty:
        return text
    plain = parameter.default is None or isinstance(parameter.default, bool | int | float)
    return f"{text} = {parameter.default!r}" if plain else None


def raising(indent: str, message: str) -> list[str]:
    """A NotImplementedError with a message of any length."""
    room = WIDTH - len(indent) - 6
    parts = textwrap.wrap(message, room - 3, drop_whitespace=False)
    if len(parts) == 1 and len(indent) + len(message) + 30 <= WIDTH:
        return [f'{indent}raise NotImplementedError("{message}")']
    inside = [f'{indent}    "{part}"' for part in parts]
    return [f"{indent}raise NotImplementedError(", *inside, f"{indent})"]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 4)


def item(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 4, initial_indent="- ", subsequent_indent="  ")


def number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "..."


def snake(home: str, name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return f"{home.partition('.')[0]}_{words}".strip("_")


def distribution(home: str) -> tuple[str, str]:
    """Name and version of the installed distribution that defines a module."""
    top = home.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    if not names:
        return top, "0"
    return names[0], importlib.metadata.version(names[0])

"""From the text of an option to what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlashBiasError, UsageError

if TYPE_CHECKING:
    from ..recipe import Recipe


def json_object(text: str | None) -> dict[str, Any]:
    """The object that ``--arch-args`` holds; raises UsageError for anything else."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--arch-args is not JSON: {error}", "quote it: '{\"a\": 1}'") from error
    if not isinstance(value, dict):
        raise UsageError(f"--arch-args must be a JSON object, got {text}")
    return value


def torch_device(name: str) -> Any:
    """The device called `name`; raises UsageError if it is not there."""
    import torch

    cards = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    known = ["cpu", *(["cuda", *cards] if cards else [])]
    if name not in known:
        raise UsageError(f"there is no device {name!r} here", f"there is {', '.join(known)}")
    return torch.device(name)


def load_recipes(files: tuple[Path, ...]) -> list[Recipe]:
    """The recipes in Python files; raises UsageError for a file that cannot be imported."""
    from ..recipe import load_recipe_file

    found = []
    for file in files:
        try:
            found.append(load_recipe_file(file))
        except FlashBiasError:
            raise
        except Exception as error:  # the file is the user's code
            raise UsageError(
                f"recipe file {file} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return found

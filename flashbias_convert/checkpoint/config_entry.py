"""The `flashbias` entry in the ``config.json`` of a transformers folder.

It is for people and tools that look, as what `save_pretrained` writes; nothing needs it to load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..plan import FORMAT_VERSION, Plan

KEY = "flashbias"


def config_entry(plan: Plan) -> dict[str, Any]:
    """What `config.json` says of a conversion."""
    return {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "sites": len(plan.patched),
    }


def mark_config(folder: Path, plan: Plan) -> None:
    """Add the entry, if the folder has a ``config.json`` of transformers."""
    config = _config_of(folder)
    if config is not None:
        _write(folder, {**config, KEY: config_entry(plan)})


def unmark_config(folder: Path) -> None:
    """Remove the entry again."""
    config = _config_of(folder)
    if config is not None and KEY in config:
        _write(folder, {key: value for key, value in config.items() if key != KEY})


def _config_of(folder: Path) -> dict[str, Any] | None:
    """Of transformers, which names a model's type in it; None for any other file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    known = isinstance(config, dict) and isinstance(config.get("model_type"), str)
    return config if known else None


def _write(folder: Path, config: dict[str, Any]) -> None:
    """As transformers writes it."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")

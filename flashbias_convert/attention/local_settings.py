"""Launch settings that were measured on this machine, in a file for each kind of card.

`flashbias-convert tune` writes them. They are read once in a process and never change within it,
so the same call gives the same bits; without a file `launch_table` holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .launch_table import launch_settings
from .tuning import LaunchSettings, LaunchShape

#: Version of the file.
VERSION = 1
#: Where files lie, unless this environment variable names another folder.
FOLDER_VARIABLE = "FLASHBIAS_TUNING"


def settings_for(device: torch.device, shape: LaunchShape) -> LaunchSettings:
    """Settings for one launch on a device: what was measured here, else those of the table."""
    if device.type == "cuda":
        found = _measured(torch.cuda.get_device_name(device))
        own = found.get(shape.rounded()) if found else None
        if own is not None:
            return own
    return launch_settings(shape)


def fingerprint() -> str:
    """One word for all that was measured for the cards of this process; empty without any."""
    if not torch.cuda.is_initialized():
        return ""
    cards = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    found = [(card, sorted(map(str, own.items()))) for card in cards if (own := _measured(card))]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else ""


def settings_file(card: str) -> Path:
    """The file of a card, by its name, whether it exists or not."""
    own, cache = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if own:
        folder = Path(own)
    else:
        folder = Path(cache) if cache else Path.home() / ".cache"
        folder = folder / "flashbias-convert" / "tuning"
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', card).strip('-').lower()}.json"


@cache
def _measured(card: str) -> Mapping[LaunchShape, LaunchSettings]:
    try:
        file = settings_file(card)
        content = file.read_text()
    except (OSError, RuntimeError):  # no file, none that may be read, no home folder
        return {}
    try:
        return parse_settings(content)
    except (ValueError, TypeError, KeyError) as problem:
        warnings.warn(
            f"the launch settings in {file} are not used: {problem}; run `flashbias-convert tune` "
            "again, or delete the file",
            stacklevel=2,
        )
        return {}


def parse_settings(text: str) -> dict[LaunchShape, LaunchSettings]:
    """What a file of this text holds.

    Raises:
        ValueError: another version, numbers that no kernel can have, or no such file at all.
        TypeError, KeyError: fields that are unknown or missing.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it is not a file of version {VERSION}")
    found = {}
    for entry in content["settings"]:
        shape = {**entry["shape"], "terms": tuple(entry["shape"]["terms"])}
        own = LaunchSettings(**entry["settings"])
        sizes = (own.block_m, own.block_n, own.num_warps)
        if not all(_power_of_two(size) for size in sizes) or own.entries not in (1, 2):
            raise ValueError(f"{own} are no settings of a kernel")
        found[LaunchShape(**shape)] = own
    return found


def _power_of_two(number: object) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def write_settings(
    file: Path, settings: Mapping[LaunchShape, LaunchSettings], about: Mapping[str, Any]
) -> None:
    """Write a file, whole or not at all; entries of an earlier one for other shapes are kept.

    Args:
        file: see `settings_file`; its folder is made.
        settings: by shape, see `LaunchShape.rounded`.
        about: the card and versions, for whoever reads the file.
    """
    kept: dict[LaunchShape, LaunchSettings] = {}
    if file.is_file():
        try:
            kept = parse_settings(file.read_text())
        except (ValueError, TypeError, KeyError):
            kept = {}  # it was of no use to anybody
    entries = [
        {"shape": asdict(shape), "settings": asdict(own)}
        for shape, own in {**kept, **settings}.items()
    ]
    content = {"version": VERSION, **about, "settings": entries}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)

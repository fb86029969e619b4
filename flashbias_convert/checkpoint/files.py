"""Which files hold the weights: a file, a folder, or the shards that an index lists."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".tar", ".mdlus")
#: names that libraries give to the weights of a folder, the most trusted first
PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pth",
    "model.pth",
)
INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")


@dataclass(frozen=True)
class WeightFiles:
    """The files that make up one checkpoint.

    Attributes:
        files: the files, each once.
        weight_map: key -> file, from an index; None for a single file.
        folder: the folder whose ``config.json`` belongs to the weights.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None
    folder: Path


def find_weight_files(path: Path) -> WeightFiles:
    """The weight files behind `path`: a file, an index, or a folder.

    Raises:
        CheckpointError: nothing there, several candidates, a missing shard, or a name that leaves
            the folder.
    """
    try:
        return _find(path)
    except OSError as error:  # names that are too long, folders that may not be read
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _find(path: Path) -> WeightFiles:
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    if path.name.endswith(INDEX_SUFFIX):
        return _from_index(path)
    if _SHARD.search(path.name):
        raise CheckpointError(
            f"{path.name} is one shard of several", f"give the folder {path.parent} instead"
        )
    return WeightFiles((path,), None, path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def _from_directory(folder: Path) -> WeightFiles:
    chosen = next((folder / n for n in PREFERRED if (folder / n).is_file()), None)
    if chosen is None:
        chosen = _only_weight_file(folder)
    check_inside(chosen, folder)
    if chosen.name.endswith(INDEX_SUFFIX):
        return _from_index(chosen)
    return WeightFiles((chosen,), None, folder)


def _only_weight_file(folder: Path) -> Path:
    found = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise CheckpointError(
            f"{folder} holds no weights", f"expected one of {', '.join(PREFERRED)}"
        )
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:5])
        raise CheckpointError(f"{folder} holds several weight files: {names}", "name one of them")
    return found[0]


def _from_index(index: Path) -> WeightFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    folder = index.parent
    shards: dict[str, Path] = {}
    for name in weight_map.values():
        # a downloaded index must not make us read files elsewhere
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(
                f"the index in {folder} names a shard outside its folder: {name!r}"
            )
        shards[name] = shards.get(name) or _shard(folder, name)
    files = {str(key): shards[name] for key, name in weight_map.items()}
    return WeightFiles(tuple(shards.values()), files, folder)


def _shard(folder: Path, name: str) -> Path:
    shard = folder / name
    if not shard.is_file():
        raise CheckpointError(f"shard {name} is missing in {folder}", "download it again")
    check_inside(shard, folder)
    return shard


def check_inside(path: Path, folder: Path) -> None:
    """Raise CheckpointError if `path` is a link that leaves `folder`.

    The cache of the Hugging Face hub links from ``snapshots/<revision>/`` to ``blobs/`` beside
    it; those links are fine.
    """
    real, home = path.resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{path} is a link to {real}, outside its folder")

"""Files of `torch.save`, read with ``weights_only=True``: no code of a file ever runs."""

from __future__ import annotations

import io
import logging
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .archive import check_legacy, read_archive
from .inert import is_data, stand_ins

logger = logging.getLogger(__name__)

#: pickles in front of the content in the format before the zip archives
_LEGACY_PREAMBLE = 3


def read_pickle(path: Path, archive: io.BytesIO | None = None) -> tuple[Any, list[str]]:
    """What `torch.save` wrote.

    Args:
        path: the file.
        archive: its content, where the file itself is an archive that holds it.

    Returns:
        The content, and notes for the user on classes that were read as plain data.

    Raises:
        CheckpointError: damaged, or with objects that could run code.
    """
    source = path if archive is None else archive
    try:
        return _torch_load(source, ()), []
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_names(source)
        forbidden = [name for name in unsafe if not is_data(name)]
        if not unsafe or forbidden:
            raise _refusal(path, forbidden, error) from error
    except CheckpointError:
        raise
    # the readers of a damaged archive raise nearly everything
    except Exception as error:
        raise damaged(path, error) from error
    try:
        content = _torch_load(source, unsafe)
    except Exception as error:
        raise _refusal(path, unsafe, error) from error
    return content, [f"objects of {_some(unsafe)} were read as plain data"]


def is_mappable(path: Path) -> bool:
    """Whether `read_pickle` maps the tensors of a file into memory and so reads none of them.

    Raises:
        CheckpointError: damaged.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return False
    return not read_archive(path).compressed


def damaged(path: Path, error: Exception) -> CheckpointError:
    """One line on a file that cannot be read."""
    # what torch says before its reason advises to switch `weights_only` off
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    lines = text.strip().splitlines() or [type(error).__name__]
    return CheckpointError(f"{path} is damaged or not a checkpoint: {lines[0][:200]}")


def _torch_load(source: Path | io.BytesIO, as_data: list[str] | tuple[()]) -> Any:
    with torch.serialization.safe_globals(stand_ins(as_data)):
        if isinstance(source, io.BytesIO):
            source.seek(0)
            return torch.load(source, map_location="cpu", weights_only=True)
        with source.open("rb") as file:
            is_archive = file.read(2) == b"PK"
        if not is_archive:
            check_legacy(source)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=False)
        archive = read_archive(source)
        if not archive.compressed:
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
            if archive.holds(_tensors_in(content)):
                return content
        logger.debug("%s cannot be memory-mapped", source)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=False)


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, and in the fields of objects that are plain data.

    Each container is entered once, however often the file refers to it: a few bytes can name one
    mapping in a number of places that grows exponentially, or inside itself.
    """
    waiting, seen = [content], set()
    while waiting:
        here = waiting.pop()
        if isinstance(here, Tensor):
            yield here
        elif id(here) not in seen:
            seen.add(id(here))
            waiting.extend(_inside(here))


def _inside(content: Any) -> Iterable[Any]:
    if isinstance(content, Mapping):
        return content.values()
    if isinstance(content, list | tuple | set):
        return content
    return vars(content).values() if hasattr(content, "__dict__") else ()


def _refusal(path: Path, names: list[str], error: Exception) -> CheckpointError:
    if not names:
        return damaged(path, error)
    return CheckpointError(
        f"{path} holds Python objects that could run code ({_some(names)}); nothing was loaded",
        "where you trust it, load it yourself and save model.state_dict()",
    )


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


# -- which classes a file names ------------------------------------------------------------


def _unsafe_names(source: Path | io.BytesIO) -> list[str]:
    """Names of classes and functions that `torch.load` refuses; [] if the file cannot be read."""
    try:
        found = _names_in_zip(source) if zipfile.is_zipfile(source) else _names_in_legacy(source)
    except Exception:  # only says more about an error that is raised anyway
        return []
    unpickler = torch._weights_only_unpickler
    known = {*unpickler._get_allowed_globals(), *unpickler._get_user_allowed_globals()}
    return sorted(found - known - {"argparse.Namespace"})


def _names_in_zip(source: Path | io.BytesIO) -> set[str]:
    with zipfile.ZipFile(source) as archive:
        records = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return _names_in_pickle(io.BytesIO(archive.read(records[0])))


def _names_in_legacy(source: Path | io.BytesIO) -> set[str]:
    """Also of a plain pickle, which is no checkpoint, but may be what somebody was sent."""
    found = set[str]()
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source.getvalue()) as file:
        end = file.seek(0, io.SEEK_END)
        file.seek(0)
        for _ in range(_LEGACY_PREAMBLE + 1):
            if file.tell() < end:
                found |= _names_in_pickle(file)
    return found


def _names_in_pickle(file: IO[bytes]) -> set[str]:
    """``module.name`` of every global; leaves the file behind the pickle."""
    found: set[str] = set()
    memo: dict[int, str] = {}
    texts = ["", ""]  # the two that were pushed last; protocol 4 takes names from the stack
    last: str | None = None  # what is on top, if it is a text
    memoized = 0
    for code, argument, _ in pickletools.genops(file):
        if code.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            module, name = _renamed(module, name)
            found.add(f"{module}.{name}")
        elif code.name == "STACK_GLOBAL":
            found.add(".".join(texts))
        if code.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            if last is not None:
                memo[memoized if argument is None else argument] = last
            memoized += 1
            continue
        is_get = code.name in ("GET", "BINGET", "LONG_BINGET")
        last = memo.get(int(str(argument))) if is_get else _text(argument)
        if last is not None:
            texts = [texts[1], last]
    return found


def _text(argument: object) -> str | None:
    return argument if isinstance(argument, str) else None


def _renamed(module: str, name: str) -> tuple[str, str]:
    """What the unpickler makes of a name of Python 2, which old protocols use."""
    if (module, name) in torch._utils.NAME_MAPPING:
        return torch._utils.NAME_MAPPING[(module, name)]
    return torch._utils.IMPORT_MAPPING.get(module, module), name

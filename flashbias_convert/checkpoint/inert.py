"""Stand-ins for classes that training checkpoints hold beside their weights.

Configs, paths and numbers of other libraries are read as plain data: the classes that a file names
are never imported, and nothing of theirs runs.
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: subclasses of dict; read as dicts
_MAPPINGS = frozenset(
    {
        "addict.addict.Dict",
        "collections.defaultdict",
        "detectron2.config.config.CfgNode",
        "easydict.EasyDict",
        "fvcore.common.config.CfgNode",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "mmcv.utils.config.ConfigDict",
        "mmengine.config.config.ConfigDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
        "yacs.config.CfgNode",
    }
)
#: everything else that may be read as an object without behaviour
_OBJECTS = re.compile(
    r"builtins\.(bool|dict|float|frozenset|int|list|object|set|slice|str|tuple)"
    r"|(datetime|decimal|enum|numpy|omegaconf|pathlib|types|typing|uuid)\..+"
    r"|(lightning|lightning_fabric|mmcv|mmengine|pytorch_lightning)\..+"
    r"|torch\.(optim\.lr_scheduler|torch_version)\..+"
)


class DataObject:
    """What an object of another library was made from: its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *args: Any) -> DataObject:
        # the unpickler creates objects without calling __init__
        made = super().__new__(cls)
        DataObject.__init__(made, *args)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataMapping(dict[Any, Any]):
    """Becomes a plain dict while it is read; the unpickler fills only those."""

    def __new__(cls, *args: Any) -> Any:
        given = args[0] if args and isinstance(args[0], Mapping) else {}
        return OrderedDict(given)


def is_data(name: str) -> bool:
    """Whether the class called `name` (``package.module.Class``) may be read as plain data."""
    return name in _MAPPINGS or _OBJECTS.fullmatch(name) is not None


def stand_ins(names: Iterable[str]) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What `torch.serialization.safe_globals` takes so that classes are read as plain data."""
    # a namespace is only attributes; a tuple, so that leaving takes nothing away from the caller
    found: list[Any] = [(argparse.Namespace, "argparse.Namespace")]
    for name in names:
        found.append((_DataMapping if name in _MAPPINGS else DataObject, name))
    return found


def plain(value: Any) -> Any:
    """A config of omegaconf as dicts, lists and values; anything else as it is."""
    state = value.state if isinstance(value, DataObject) else None
    if not isinstance(state, Mapping):
        return value
    if "_content" not in state:
        return state.get("_val", value)
    content = state["_content"]
    if isinstance(content, Mapping):
        return {key: plain(own) for key, own in content.items()}
    return [plain(own) for own in content] if isinstance(content, list) else content

"""Writes checkpoints as the training programs of others do, with classes that are not installed."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@contextmanager
def installed(name: str, base: type = object, **members: Any) -> Iterator[type]:
    """A class called `name` (``package.module.Class``) that exists only inside the block.

    Files that are written inside refer to it; when they are read it is gone.
    """
    path, _, class_name = name.rpartition(".")
    parts = path.split(".")
    modules = [".".join(parts[: i + 1]) for i in range(len(parts))]
    fresh = [module for module in modules if module not in sys.modules]
    for module in fresh:
        sys.modules[module] = types.ModuleType(module)
    made = type(class_name, (base,), {"__module__": path, **members})
    setattr(importlib.import_module(path), class_name, made)
    try:
        yield made
    finally:
        delattr(sys.modules[path], class_name)
        for module in fresh:
            del sys.modules[module]


def write_swin_training(path: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """As the program of Swin's authors: the config is a tree of yacs nodes with attributes."""
    with installed("yacs.config.CfgNode", dict) as node:

        def tree(values: dict[str, Any]) -> Any:
            made = node({k: tree(v) if isinstance(v, dict) else v for k, v in values.items()})
            made.__dict__.update(__immutable__=True, __deprecated_keys__=set())
            return made

        content = {
            "model": weights,
            "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": []},
            "lr_scheduler": {"base_values": [0.1]},
            "max_accuracy": 81.0,
            "scaler": {"scale": 65536.0},
            "epoch": 299,
            "config": tree(config),
        }
        torch.save(content, path)
    return path

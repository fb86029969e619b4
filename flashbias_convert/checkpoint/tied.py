"""Weights that a config ties but a file holds apart."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def untie_different(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give parameters of their own to tied names whose values in the file differ.

    Otherwise the last one loaded would silently overwrite the others.
    """
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    for first, *others in groups.values():
        for name in others:
            if first in tensors and name in tensors and not _equal(tensors[first], tensors[name]):
                logger.warning("%s and %s are tied in the model but differ: untied", first, name)
                _own_parameter(model, name)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def _own_parameter(model: nn.Module, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    old = getattr(owner, leaf)
    setattr(owner, leaf, nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad))

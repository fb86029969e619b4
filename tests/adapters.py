"""Modules that others put around parts of a model, as libraries for fine-tuning do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A projection and a low-rank change of its output, which can be switched off."""

    def __init__(self, base: nn.Module, size: int, out: int) -> None:
        super().__init__()
        self.base_layer, self.enabled = base, True
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(size, 2, generator=generator) * 0.3)
        self.up = nn.Parameter(torch.randn(2, out, generator=generator) * 0.3)

    @property
    def weight(self) -> Tensor:
        """Of the projection alone; who reads it gets no change."""
        weight: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        return out + x @ self.down @ self.up if self.enabled else out


class Replaced(nn.Module):
    """A module and a changed copy of it, of which one runs."""

    def __init__(self, original: nn.Module, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.original_module, self.enabled = original, True
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        with torch.no_grad():
            change(self.modules_to_save["default"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self.modules_to_save["default"] if self.enabled else self.original_module
        return chosen(*args, **kwargs)


def add_adapters(model: nn.Module, wanted: Callable[[str], bool]) -> int:
    """Put an adapter around every projection whose name is wanted; how many there are."""
    found = [(name, module) for name, module in model.named_modules() if wanted(name)]
    count = 0
    for name, module in found:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        sizes = tuple(weight.shape)  # Conv1D of transformers has (in, out)
        size, out = sizes if type(module).__name__ == "Conv1D" else sizes[::-1]
        model.set_submodule(name, Adapter(module, size, out).train(model.training))
        count += 1
    return count


def switch(model: nn.Module, enabled: bool) -> None:
    """Switch every adapter and every changed copy of a model on or off."""
    for module in model.modules():
        if isinstance(module, Adapter | Replaced):
            module.enabled = enabled

"""Which modules are running, and a model that is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModulePath:
    """The names of the modules that are running now, outermost first.

    Args:
        model: its modules are followed by hooks while `follow` lasts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        #: how often each module has started
        self.starts: dict[str, int] = {}

    @property
    def now(self) -> tuple[str, ...]:
        """Names from the root on; the root is "" and always among them."""
        return tuple(self._running) or ("",)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Hooks on every module, removed again whatever happens."""
        handles = []
        try:
            for name, module in self._model.named_modules():
                handles.append(module.register_forward_pre_hook(self._entering(name)))
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._running.append(name)
            self.starts[name] = self.starts.get(name, 0) + 1

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()


def common_module(*paths: tuple[str, ...]) -> str:
    """The innermost module that all paths go through."""
    shared = ""
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared = names[0]
    return shared


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module in its own mode again after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode

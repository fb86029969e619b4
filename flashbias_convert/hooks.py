"""Modules whose forward accelerate has wrapped: another class beneath the hook, weights elsewhere.

`dispatch_model` of accelerate, which `from_pretrained(device_map=...)` of transformers calls, puts
a `forward` on the instance that loads weights, calls `_old_forward` and drops the weights again.
Nothing of it is imported here: its hooks are known by what they carry.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: attributes of an instance that hold its forward: what runs, and what accelerate calls beneath
_FORWARDS = ("forward", "_old_forward")


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced on the instance by something that is not understood.

    Not so where accelerate wraps the forward of the module's class, or has left that behind.
    """
    own = vars(module)
    if "forward" not in own:
        return False
    beneath = own["_old_forward" if "_hf_hook" in own else "forward"]
    return not _is_of_class(beneath, module)


def swap_class(module: nn.Module, cls: type[Any]) -> None:
    """Give a module another class; accelerate calls the forward of that from now on.

    Args:
        module: any; a foreign forward stays where it is.
        cls: compatible with its class.
    """
    own = [name for name in _FORWARDS if _is_of_class(vars(module).get(name), module)]
    module.__class__ = cls
    for name in own:
        vars(module)[name] = types.MethodType(cls.forward, module)


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
        return False
    return forward.__func__ is type(module).forward


def children_read(module: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """The children that a patched forward may read: None means all."""
    if names is None:
        return list(module.children())
    found = (module._modules.get(name) for name in names)
    return [child for child in found if child is not None]


# -- weights that are elsewhere --------------------------------------------------------------


def is_hooked(module: nn.Module, names: str) -> bool:
    """Whether accelerate has hooks on a module or on a child of it; every call asks.

    It has none where a module has no tensors of its own, and hooks on children all the same.

    Args:
        module: whose forward is to run.
        names: of its children, with spaces between, or nothing where they are not known. Compiled
            code goes by them: it would check in every call that a dictionary which it has gone
            through has the same keys.
    """
    if "_hf_hook" in module.__dict__:
        return True
    if names and torch.compiler.is_compiling():
        for name in names.split():
            child = module._modules.get(name)
            if child is not None and "_hf_hook" in child.__dict__:
                return True
        return False
    for child in module._modules.values():  # a loop: a generator takes twice as long
        if child is not None and "_hf_hook" in child.__dict__:
            return True
    return False


@contextmanager
def at_hand(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Weights that accelerate keeps on disk, or on the CPU, are there inside.

    Meanwhile calls of these modules do not load or drop them.

    Args:
        modules: with everything below them.
    """
    found = {module: None for root in modules for module in root.modules()}
    held: list[tuple[nn.Module, Any, Any]] = []
    try:
        for module in found:
            for hook in _loading_hooks(module):
                came_from = hook.input_device
                hook.pre_forward(module)
                hook.offload = False
                held.append((module, hook, came_from))
        yield
    finally:
        for module, hook, came_from in reversed(held):
            hook.offload = True
            hook.post_forward(module, None)
            hook.input_device = came_from


def _loading_hooks(module: nn.Module) -> Iterator[Any]:
    hook = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False) is True and hasattr(one, "weights_map"):
            yield one


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate places the weights of a module, or of a part of it."""
    return any("_hf_hook" in vars(child) for child in module.modules())


def loads_all_below(module: nn.Module) -> bool:
    """Whether accelerate loads every tensor below a module by name: it has none for new ones."""
    return any(hook.place_submodules and hook.offload_buffers for hook in _loading_hooks(module))

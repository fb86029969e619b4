"""Classes made of two parents: what a recipe supplies, in front of a module's original class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import fx, nn

from .errors import UsageError
from .hooks import at_hand, children_read, is_hooked

#: in front of the name of an original class
PATCHED_PREFIX = "FlashBias"


class Composed(nn.Module):
    """Base of the classes that recipes supply.

    The engine composes a subclass with the original class of a module and assigns the result to
    the module's ``__class__``, so that parameters, hooks, names and identity stay.
    """

    original_class: ClassVar[type[nn.Module]]
    recipe_class: ClassVar[type[nn.Module]]
    #: names of its children, with spaces between: compiled code checks a string fastest
    _child_names: str = ""

    @classmethod
    def children_to_read(cls) -> Sequence[str] | None:
        """Names of children whose weights the patched forward may read by itself; None for all.

        Where a wrapper keeps weights on disk they are loaded before the forward runs.
        """
        return None

    @classmethod
    def composed_methods(cls) -> dict[str, Callable[..., Any]]:
        """Methods that each composed class has of its own, by name.

        Of one that it inherits, and of an attribute of a parent, compiled code asks in every call,
        for every layer, whether a class in front of that has come to hide it.
        """
        return {}

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computed before it was patched."""
        return self.original_class.forward(self, *args, **kwargs)

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script, which would compile the Python around the operator."""
        raise UsageError(
            "torch.jit.script cannot compile converted modules "
            f"({self.original_class.__name__} is one)",
            "use torch.export, torch.compile or torch.jit.trace, or unpatch_model first",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the composed class has no importable name, so a copy is rebuilt from its two parents
        return _new_instance, (self.recipe_class, self.original_class), self._copied_state()

    def _copied_state(self) -> dict[str, Any]:
        return self.__dict__

    def note_children(self) -> None:
        """Remember the names of its children; whoever patches it calls this."""
        self._child_names = " ".join(self._modules)


def compose(recipe_class: type[Composed], original_class: type[nn.Module]) -> type[Any]:
    """The class of a patched module: `recipe_class` in front of `original_class`, made once."""
    if (recipe_class, original_class) not in _COMPOSED:
        _COMPOSED[recipe_class, original_class] = type(
            _name(original_class),
            (recipe_class, original_class),
            {
                # transformers looks up what a model can return by the printed name of its class
                "__module__": original_class.__module__,
                "__qualname__": original_class.__qualname__,
                "recipe_class": recipe_class,
                "original_class": original_class,
                **recipe_class.composed_methods(),
                "forward": _named_arguments(recipe_class.forward, original_class.forward),
            },
        )
    return _COMPOSED[recipe_class, original_class]


def _name(original_class: type[nn.Module]) -> str:
    """Not another one for a whole model of transformers, which writes it into its config."""
    whole = hasattr(original_class, "save_pretrained")
    return original_class.__name__ if whole else f"{PATCHED_PREFIX}{original_class.__name__}"


def _named_arguments(
    forward: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward` with the signature of `original`, and with the weights that it reads at hand.

    Others ask for the signature: torch.export to name inputs, trainers to know which columns a
    model takes.
    """

    def patched_forward(self: Composed, *args: Any, **kwargs: Any) -> Any:
        given = (args,) if isinstance(args, fx.Proxy) else (*args, *kwargs.values())
        for value in given:  # torch.fx makes one of all arguments of a whole model
            if isinstance(value, fx.Proxy):
                return _as_one_node(self, value.tracer, args, kwargs)
        if not is_hooked(self, self._child_names):
            return forward(self, *args, **kwargs)
        # the hooks of children load their weights when they are called; it may read them before
        with at_hand(children_read(self, self.children_to_read())):
            return forward(self, *args, **kwargs)

    patched_forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    patched_forward.__doc__ = original.__doc__
    return patched_forward


def _as_one_node(module: nn.Module, tracer: Any, args: Any, kwargs: Any) -> fx.Proxy:
    """The call of a patched module in a graph of torch.fx, which records it as a leaf.

    Feature extractors (of torchvision, of timm) trace models so. What a patched forward does
    depends on values and sizes, so it has to run anew in each call of the graph.

    Raises:
        UsageError: the whole model is this one module, so that nothing would be left to look into.
    """
    if module is tracer.root:
        kind = type(module).original_class.__name__
        raise UsageError(
            f"torch.fx cannot look into a converted {kind}, which is the whole model here",
            "trace the original, or use forward hooks",
        )
    made: fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
    return made


_COMPOSED: dict[tuple[type, type], type[Any]] = {}


def _new_instance(recipe_class: type[Composed], original_class: type[nn.Module]) -> Composed:
    made: Composed = object.__new__(compose(recipe_class, original_class))
    return made

"""The base class of patched owners: modules that make biases and masks for the attention below."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .composed import Composed
from .errors import StaleTermsError
from .patched_attention import PatchedAttention
from .seals import Seal, kept_elsewhere, state_of, values_of


class PatchedOwner(Composed):
    """Base of the classes that recipes supply for owners.

    An owner is a module whose forward makes a bias or a mask once and hands it to the attention
    modules below: BLOOM makes its ALiBi so, T5 its table. Patched, it hands on something of linear
    size instead. All of its attention modules are patched, or none: they share what it makes; and
    all of them train their terms, or none.

    A recipe writes `flashbias_forward`, and there calls `self.original_forward` inside
    ``with self.lean():``. In training mode, or while an attention module would run its own original
    forward, the original forward runs with its own bias and masks.
    """

    #: names of children whose weights `flashbias_forward` reads by itself, without calling them
    reads: ClassVar[tuple[str, ...]] = ()
    #: attributes of the original that the class replaces by properties, see `aside`
    replaced: ClassVar[tuple[str, ...]] = ()

    #: the patched attention modules below, set by the engine
    _consumers: tuple[PatchedAttention, ...]
    #: their names below it, with spaces between
    _consumer_names: str = ""
    _lean: bool
    #: None until the sources have values
    _seal: Seal | None
    #: what `is_stale` said last; compiled code guards on it, and looks at nothing else
    _found_stale: bool = False

    @classmethod
    def children_to_read(cls) -> tuple[str, ...]:
        return cls.reads  # not all: the attention, and perhaps the whole model, lies below

    def fixed_sources(self) -> tuple[Tensor, ...]:
        """Buffers of its own that terms were made from and that no state dict holds.

        What a state dict holds changes with a load, and belongs to the attention modules.
        """
        return ()

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with the bias and the masks that it makes replaced."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._runs_original():
            return self.original_forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.check_fresh()
        elif self._found_stale:
            raise StaleTermsError(*self._complaint())
        return self.flashbias_forward(*args, **kwargs)

    def _runs_original(self) -> bool:
        """Not if all of its attention modules train their terms; else in training."""
        consumers = self._found_consumers() or self._consumers
        if any(module.runs_original() for module in consumers):
            return True
        return self.training and not all(module.trains_terms for module in consumers)

    def _found_consumers(self) -> list[PatchedAttention]:
        """Its attention modules where calls find them, in code that is compiled; else nothing.

        Code that reached them in another way, too, would check in each call, for every layer, that
        both lead to the same module.
        """
        if not torch.compiler.is_compiling():
            return []
        found = []
        for path in self._consumer_names.split():
            module: nn.Module | None = self
            for name in path.split("."):
                module = None if module is None else module._modules.get(name)
            if not isinstance(module, PatchedAttention):  # something was put around it since
                return []
            found.append(module)
        return found

    def seal(self) -> None:
        """Declare that the terms belong to the sources as they are now."""
        sources = self.fixed_sources()
        known = not any(tensor.is_meta for tensor in sources)
        self._seal = Seal.of(sources) if known else None
        if self._found_stale:
            self._found_stale = False

    def is_stale(self) -> bool:
        """Whether the sources have changed since then; reads them only where they may have."""
        found = self._have_changed()
        if found is not self._found_stale:  # what is set anew would be compiled anew
            self._found_stale = found
        return found

    def _have_changed(self) -> bool:
        sources = self.fixed_sources()
        seal = self._seal
        if seal is None:
            self.seal()
        elif not seal.is_untouched(state_of(sources)) and not kept_elsewhere(self, sources):
            if seal.values != values_of(sources):
                self._seal = seal.in_doubt()
                return True
            self._seal = seal.renewed(sources)  # the same numbers elsewhere: a copy
        return False

    def look(self) -> bool:
        """`is_stale` by the numbers themselves."""
        if self._seal is not None:
            self._seal = self._seal.in_doubt()
        return self.is_stale()

    def check_fresh(self) -> None:
        """Raise StaleTermsError if `is_stale`."""
        if self.is_stale():
            raise StaleTermsError(*self._complaint())

    def _complaint(self) -> tuple[str, str]:
        name = self.original_class.__name__
        return (
            f"what this {name} makes its bias from has changed since it was converted",
            "run unpatch_model and patch_model again",
        )

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not mode:
            self.look()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        stale = self.look()
        moved = super()._apply(fn, recurse)
        if not stale:
            self.seal()
        return moved

    @classmethod
    def owner_class(cls) -> type[PatchedOwner]:
        """The class that the recipe supplied."""
        assert issubclass(cls.recipe_class, PatchedOwner)
        return cls.recipe_class

    @contextmanager
    def lean(self) -> Iterator[None]:
        """Inside, in this thread, `is_lean`: methods that make a bias return a placeholder."""
        self._set_lean(True)
        try:
            yield
        finally:
            self._set_lean(False)

    def _set_lean(self, value: bool) -> None:
        if torch.compiler.is_compiling():  # which cannot look into threads, and has one
            self._lean = value
        elif value:
            _now_lean().add(id(self))
        else:
            _now_lean().discard(id(self))

    @property
    def is_lean(self) -> bool:
        """Whether the forward of now hands on no bias and no mask of quadratic size."""
        return self._lean if torch.compiler.is_compiling() else id(self) in _now_lean()


def aside(name: str) -> str:
    """Where a patched owner keeps an attribute that a property of the same name replaces.

    Not under its own name: torch.compile, up to torch 2.11 at least, answers
    ``self.__dict__[name]`` with the property, which asks again.
    """
    return f"_original_{name.lstrip('_')}"


_THREAD = threading.local()


def _now_lean() -> set[int]:
    """The owners whose forward runs in this thread and is lean."""
    if not hasattr(_THREAD, "lean"):
        _THREAD.lean = set()
    found: set[int] = _THREAD.lean
    return found

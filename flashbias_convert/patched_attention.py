"""The base class of patched attention modules: which forward runs, and when terms are stale."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .errors import StaleTermsError
from .modules import ScoreBiasModule

_STALE = ("stale before it was copied",)


class PatchedAttention(nn.Module):
    """Base of the classes that recipes supply for patched attention modules.

    A recipe subclasses it and writes `flashbias_forward` and `bias_sources`. The engine composes
    that subclass with the original class of a module and assigns the result to the module's
    ``__class__``, so that parameters, hooks, names and identity stay.

    In training mode the original forward runs, with its dropout and gradients.
    """

    original_class: ClassVar[type[nn.Module]]
    recipe_class: ClassVar[type[PatchedAttention]]

    score_bias: ScoreBiasModule

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with its scores, bias, mask and softmax replaced."""
        raise NotImplementedError

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        """Everything that the terms were made from: parameters, buffers, sizes."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if not torch.compiler.is_compiling():
            self.check_fresh()
        return self.flashbias_forward(*args, **kwargs)

    # -- staleness -------------------------------------------------------------------------

    def seal(self) -> None:
        """Declare that the terms belong to the weights and sizes as they are now."""
        self.__dict__["_seal"] = _state_of(self.bias_sources())
        self.score_bias.just_loaded = False

    def is_stale(self) -> bool:
        """Whether weights or sizes have changed since the terms were made."""
        if self.score_bias.just_loaded or self.__dict__.get("_seal") is None:
            self.seal()
        return bool(self.__dict__["_seal"] != _state_of(self.bias_sources()))

    def check_fresh(self) -> None:
        """Raise StaleTermsError if `is_stale`."""
        if self.is_stale():
            raise StaleTermsError(
                f"the weights, window or input size of this {self.original_class.__name__} have "
                "changed since it was converted",
                "run unpatch_model and patch_model again",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        stale = self.is_stale()
        moved = super()._apply(fn, recurse)
        if not stale:  # a move or a cast changes tensors, but not what they say
            self.seal()
        return moved

    # -- copies ----------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the composed class has no importable name, so a copy is rebuilt from its two parents
        state = {**self.__dict__, "_seal": _STALE if self.is_stale() else None}
        return _new_instance, (self.recipe_class, self.original_class), state


def _state_of(sources: tuple[Tensor | Hashable, ...]) -> tuple[Hashable, ...]:
    return tuple(
        (id(s), -1 if s.is_inference() else s._version) if isinstance(s, Tensor) else s
        for s in sources
    )


@cache
def compose(recipe_class: type[PatchedAttention], original_class: type[nn.Module]) -> type:
    """The class of a patched module: `recipe_class` in front of `original_class`."""
    return type(
        f"FlashBias{original_class.__name__}",
        (recipe_class, original_class),
        {
            "__module__": original_class.__module__,
            "recipe_class": recipe_class,
            "original_class": original_class,
        },
    )


def _new_instance(recipe_class: type[PatchedAttention], original_class: type[nn.Module]) -> Any:
    cls = compose(recipe_class, original_class)
    return cls.__new__(cls)

"""Builders with tensors of their own: networks that make a term from the input of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .terms import Term


class BuilderModule(nn.Module):
    """Base of modules that make a term from the input of a call.

    A site keeps one as a submodule of its `score_bias`; its weights go into the checkpoint as
    ``<site>.score_bias.<name>.<tensor>``, and its kind and `config` into the plan.

    Weights stay fp32 whatever the model is cast to, like factors: only the device moves.
    """

    #: the name under which files know this class, see `builders.register_builder_module`
    kind: ClassVar[str]
    #: kinds of planned terms that are left out where it is used
    replaces: ClassVar[tuple[str, ...]] = ()

    def config(self) -> dict[str, Any]:
        """Arguments of `from_config`, as JSON values."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A module of these sizes whose weights wait for a state dict; draws no random numbers.

        Allocates on torch's default device: costs nothing under ``torch.device("meta")``.

        Raises:
            ValueError, TypeError: a config that makes no sense.
        """
        raise NotImplementedError

    def make(self, **inputs: Any) -> Term:
        """The term of one call."""
        raise NotImplementedError

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Shape and dtype, as JSON, of everything in the state dict."""
        return {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in self.state_dict().items()
        }

    def check(self) -> None:
        """Raise ValueError for weights that no fit makes, such as those of a damaged file."""
        for name, tensor in self.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {self.kind} holds NaN or infinity")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(keeping_dtype(fn), recurse)


def keeping_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `nn.Module._apply` is called with, but that it only moves tensors and casts none."""

    def keep_dtype(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return keep_dtype


def without_autocast(device: torch.device) -> Any:
    """A context in which products of fp32 tensors stay fp32."""
    return torch.autocast(device.type, enabled=False)

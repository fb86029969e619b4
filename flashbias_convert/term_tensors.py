"""The module that holds the tensors of one term."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .builder_module import keeping_dtype
from .terms import Term

_LENT = "_flashbias_lent"


def lend(tensor: Tensor, to_modules: bool = True) -> Tensor:
    """Say that modules take this very tensor, contiguous and in memory of its own, uncopied.

    Args:
        tensor: of a term; returned.
        to_modules: False takes that back for modules to come.
    """
    setattr(tensor, _LENT, to_modules)
    return tensor


class TermTensors(nn.Module):
    """The tensors of one term, named like its fields: buffers, or parameters to be trained."""

    def __init__(self, term: Term, trained: bool = False) -> None:
        super().__init__()
        self._pinned = frozenset(k for k, pinned in term.tensor_fields().items() if pinned)
        for name, tensor in term.tensors().items():
            # own and contiguous: a slice of an SVD would keep all of it alive, and checkpoints
            # want tensors that share nothing
            copied = trained or not getattr(tensor, _LENT, False)
            own = tensor.detach()
            if copied:
                own = own.clone(memory_format=torch.contiguous_format)
            if trained and own.is_floating_point():
                self.register_parameter(name, nn.Parameter(own))
            else:
                self.register_buffer(name, own)

    def freeze(self) -> None:
        """Turn parameters into buffers."""
        for name, parameter in list(self._parameters.items()):
            assert parameter is not None
            del self._parameters[name]
            self.register_buffer(name, parameter.detach())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TermTensors:
        if self._parameters:  # all of them fp32, and so are their gradients
            super()._apply(keeping_dtype(fn), recurse)
            return self
        # a cast must not round integers or factors: keep the device move, undo the dtype change
        for name, old in self._buffers.items():
            if old is None:
                continue
            moved = fn(old)
            pinned = name in self._pinned or not old.is_floating_point()
            if pinned and moved.dtype != old.dtype:
                moved = old.to(moved.device)
            self._buffers[name] = moved
        return self

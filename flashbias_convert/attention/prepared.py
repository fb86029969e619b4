"""A bias with its kernel-ready forms, made once and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ..terms import ScoreBias
from .arguments import broadcasts
from .packing import PackedBias, pack, unsupported
from .training_packing import pack_for_training, training_problem

T = TypeVar("T")


class PreparedBias:
    """A bias whose terms do not change between calls.

    Holds what the operator works out from it, so that a call spends nothing on it. Make a new one
    when a tensor of the bias changes.

    Args:
        bias: the terms.
    """

    def __init__(self, bias: ScoreBias) -> None:
        self.bias = bias
        self.requires_grad = bias.requires_grad
        self._kept: dict[Hashable, Any] = {}

    def packed(self, half: bool, scale: float | None) -> PackedBias:
        """The form that the kernel reads next to q, k and v; see `pack`."""
        return self._keep(("packed", half, scale), lambda: pack(self.bias, half=half, scale=scale))

    def packed_for_training(self, half: bool) -> PackedBias:
        """The form that the operator with gradients takes; see `pack_for_training`.

        Kept only if no gradient flows through it: a graph serves one backward pass.
        """
        if self.requires_grad:
            return pack_for_training(self.bias, half=half)
        return self._keep(("training", half), lambda: pack_for_training(self.bias, half=half))

    def problem(self, half: bool, training: bool = False) -> str | None:
        """Why the kernels cannot add this bias, or None if they can.

        Args:
            half: q, k and v are in half precision.
            training: a backward pass may follow.
        """
        find = training_problem if training else unsupported
        if torch.compiler.is_compiling():  # the answer is a constant of the graph
            return find(self.bias, half=half)
        return self._keep(("problem", half, training), lambda: find(self.bias, half=half))

    def check_fits(self, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
        """Raise ValueError unless the terms fit a call of these sizes. Reads shapes only."""
        if torch.compiler.is_compiling():
            return _check_fits(self.bias, batch, heads, n, m)
        call = (batch, heads, n, m)
        return self._keep(call, lambda: _check_fits(self.bias, *call))

    def _keep(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self._kept:
            return self._kept[key]
        made = make()
        # a graph that is being traced must not change what the next call finds
        if not torch.compiler.is_compiling():
            self._kept[key] = made
        return made


def _check_fits(bias: ScoreBias, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
    if bias.num_heads != heads:
        raise ValueError(f"the bias is for {bias.num_heads} heads, q has {heads}")
    for term in bias.terms:
        if not broadcasts(term.batch_shape(), batch):
            raise ValueError(
                f"{term.kind}: batch dimensions {term.batch_shape()} do not broadcast to those "
                f"of q, {batch}"
            )
        term.check_sizes(n, m)

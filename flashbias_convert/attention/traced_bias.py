"""A bias that was prepared, as code that is compiled sees it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..terms import ScoreBias, Term
from .prepared import (
    PreparedBias,
    check_sizes_of_call,
    fixed_by,
    make_outside_of_the_graph,
    problem_of,
    settled,
)


class FlatBias(NamedTuple):
    """What the kernels take of a `PackedBias`."""

    spec: str
    tensors: list[Tensor]


class Holder(Protocol):
    """What keeps biases that are prepared.

    Attributes:
        flat: `PreparedBias.flat` of each, by which it is.
    """

    flat: dict[Any, dict[Any, Any]]

    def kept(self, which: Any) -> PreparedBias:
        """The bias itself."""
        ...


class TracedBias:
    """Stands for a `PreparedBias` while torch.compile traces, and is gone in the graph.

    Compiled code checks in every call whatever the trace has looked at, in every layer, and on a
    card the host has little time for that: a token of a language model. It passes over a whole
    module if nobody has touched its dictionaries and they hold nothing but modules, dictionaries,
    tensors, numbers and strings. So this one reads nothing else, until somebody asks for the terms.

    Args:
        holder: keeps the bias. It is asked again and again: what a trace has once looked into, a
            dictionary, or what it hands to the class of a new object, it takes to stay as it is.
        which: of those that it keeps.
    """

    #: biases with terms that ask for gradients are none of these
    requires_grad = False

    def __init__(self, holder: Holder, which: Hashable) -> None:
        self._holder, self._which = holder, which

    @property
    def bias(self) -> ScoreBias:
        """The terms."""
        return self._holder.kept(self._which).bias

    @property
    def is_empty(self) -> bool:
        """Whether it has no terms."""
        empty: bool = self._holder.flat[self._which]["is_empty"]
        return empty

    def joined(self, extra: tuple[Term, ...]) -> PreparedBias:
        """See `PreparedBias.joined`."""
        return self._holder.kept(self._which).joined(extra)

    def packed(self, half: bool, scale: float | None) -> FlatBias:
        """See `PreparedBias.packed`."""
        return self._form("attention", half, None if scale is None else settled(scale))

    def packed_for_training(self, half: bool) -> FlatBias:
        """See `PreparedBias.packed_for_training`."""
        return self._form("training", half, None)

    def _form(self, purpose: str, half: bool, scale: float | None) -> FlatBias:
        make_outside_of_the_graph(self._alike(), purpose, half, scale)
        made = self._holder.flat[self._which]["forms"][purpose, half, scale]
        return FlatBias(made["spec"], [made[i] for i in range(made["count"])])

    def _alike(self) -> str:
        alike: str = self._holder.flat[self._which]["alike"]
        return alike

    def problem(self, half: bool) -> str | None:
        """See `PreparedBias.problem`."""
        return problem_of(self._alike(), half)

    def check_fits(self, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
        """See `PreparedBias.check_fits`."""
        check_sizes_of_call(fixed_by(self._alike()), batch, heads, n, m)

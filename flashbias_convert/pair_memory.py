"""What a site remembers of a pair representation that comes again: the terms of its bias."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .attention import PreparedBias
from .attention.training_costs import card_class
from .decompose.decision import HeadDecision
from .decompose.randomised import decompose_quickly
from .decompose.serving import Serving
from .terms import Dense, ScoreBias

#: calls for one structure where nobody says how many: the usual number in AlphaFold 3
DENOISING_STEPS = 200


class Seen:
    """Tells a tensor from others without keeping it alive.

    The same numbers are those at the same place in memory that nobody has freed or written to
    since. Inference tensors do not count who writes to them.

    Args:
        tensor: to be told again.
        anywhere: whatever looks like it counts as the same.
    """

    def __init__(self, tensor: Tensor, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        self._looks = _looks(tensor, anywhere)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def again(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, or a view of the same numbers."""
        if not self._anywhere and self._storage.expired():  # its place may be another's by now
            return False
        return self._looks == _looks(tensor, self._anywhere)


def _looks(tensor: Tensor, anywhere: bool) -> Hashable:
    looks = (tensor.shape, tensor.dtype, tensor.device)
    if anywhere:
        return looks
    version = -1 if tensor.is_inference() else tensor._version
    return (*looks, tensor.stride(), tensor.data_ptr(), version)


@dataclass(eq=False)
class PairMemory:
    """The terms of one site, for one pair representation at a time.

    Attributes:
        name: of the site.
        energy, rank, max_attention_error: see `decompose_quickly`.
        unchanged: the caller vouches that the representation stays the same, although each call
            may bring a copy of it; else a tensor is the same if it is the same object, or another
            view of its memory, and nobody has written to it.
        steps: calls that each structure is expected to bring.
        decisions: one per head, from when the terms were made; empty before.
        calls: how many calls came.
        served: how many of them found their terms made.
    """

    name: str
    energy: float = 0.99
    rank: int | None = None
    max_attention_error: float = 0.25
    unchanged: bool = False
    steps: int = DENOISING_STEPS
    decisions: tuple[HeadDecision, ...] = ()
    calls: int = 0
    served: int = 0
    _seen: tuple[Seen, ...] = ()
    _prepared: PreparedBias | None = field(default=None, repr=False)
    #: scores of a head in the largest calls whose factors were made and did not pay
    _in_vain: int = 0

    def serves(self, source: Tensor, weights: tuple[Tensor, ...]) -> bool:
        """Whether a call may use what is remembered: not while it is traced or differentiated.

        Args:
            source, weights: see `prepared`; what is kept would give neither a gradient.
        """
        if torch.compiler.is_compiling():
            return False
        asks = source.requires_grad or any([weight.requires_grad for weight in weights])
        return not (asks and torch.is_grad_enabled())

    def prepared(
        self,
        source: Tensor,
        weights: tuple[Tensor, ...],
        make: Callable[[], Tensor],
        head_dim: int | None = None,
        rows: int = 1,
    ) -> PreparedBias:
        """The terms for a call.

        A representation that comes for the first time may never come again, so its bias is used
        as it is; the second time, terms are made, and from then on they are kept.

        Args:
            source: the tensor that the bias is made from.
            weights: what projects it.
            make: makes the bias, (*batch, H, N, M).
            head_dim: size of a head, on which costs depend.
            rows: entries of the batch that attend in this call, and, as is assumed, in later ones.
        """
        self.calls += 1
        tensors = (source, *weights)
        same = len(self._seen) == len(tensors) and all(
            seen.again(tensor) for seen, tensor in zip(self._seen, tensors, strict=True)
        )
        if same and self._prepared is not None:
            self.served += 1
            return self._prepared
        self._seen = (Seen(source, self.unchanged), *(Seen(weight) for weight in weights))
        self._prepared = None
        if not same and not self.unchanged:
            bias = make()
            return PreparedBias(ScoreBias((Dense(bias=bias),), bias.shape[-3]), once=True)
        self._prepared = self._terms(make(), head_dim, rows)
        return self._prepared

    def forget(self) -> None:
        """Let go of the tensors; decisions and counts stay."""
        self._seen, self._prepared = (), None

    def _terms(self, bias: Tensor, head_dim: int | None, rows: int) -> PreparedBias:
        scores = rows * bias.shape[-2] * bias.shape[-1]
        # the first call went by before it was known that there would be more
        calls = self.steps if self.unchanged else self.steps - 1
        serving = Serving(calls, rows, card_class(bias.device), scores <= self._in_vain)
        made = decompose_quickly(
            bias,
            energy=self.energy,
            rank=self.rank,
            max_attention_error=self.max_attention_error,
            name=self.name,
            head_dim=head_dim,
            serving=serving,
        )
        if made.in_vain:
            self._in_vain = scores
        self.decisions = made.decisions
        return PreparedBias(made.bias)

"""Scores of any shape in one layout: (batch, H, N, M)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

#: names under which modules keep their number of heads
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "head_number", "n_head", "nhead", "heads")


class Layout:
    """How the leading dimensions of scores become a batch and heads.

    Args:
        lead: the dimensions of scores before the last two.
        module: may say how many heads it has.
        samples: entries in the batch of the model's input; a guess where nobody says.
        alike: what is added is the same for all of a single dimension, so nothing in it tells heads
            apart: a module may call one head after the other.
    """

    def __init__(
        self, lead: Sequence[int], module: nn.Module, samples: int, alike: bool = False
    ) -> None:
        self.lead = tuple(lead)
        told = _told_heads(module)
        self._split = 0  # of a single dimension that holds batch and heads
        if not self.lead:
            self.axis = None
        elif alike and len(self.lead) == 1:
            self._split, self.axis = 1, None
        elif told in self.lead:
            self.axis = max(i for i, size in enumerate(self.lead) if size == told)
        elif len(self.lead) == 1:
            guess = told or (self.lead[0] // samples if self.lead[0] % samples == 0 else 1)
            self._split = guess if self.lead[0] % guess == 0 else 1
            self.axis = None
        else:
            self.axis = len(self.lead) - 1
        self.heads = self._split or (1 if self.axis is None else self.lead[self.axis])
        self.batch = math.prod(self.lead) // self.heads

    def bring(self, tensor: Tensor) -> Tensor:
        """(*lead, X, Y), or what broadcasts to it, as (b, H or 1, X, Y); see `AttentionCall`."""
        missing = len(self.lead) + 2 - tensor.dim()
        tensor = tensor.reshape(*(1,) * max(0, missing), *tensor.shape)
        if self.axis is not None:
            tensor = tensor.movedim(self.axis, -3)
        elif not self.lead:
            tensor = tensor[None, None]
        elif tensor.shape[0] == 1:
            tensor = tensor[:, None]
        else:
            tensor = tensor.unflatten(0, (-1, self._split))
        outer = tensor.shape[:-3]
        if len(outer) < 2:
            return tensor.reshape(math.prod(outer), *tensor.shape[-3:])
        # what repeats itself outermost is written down once
        first = next((i for i, size in enumerate(outer) if size > 1), len(outer))
        whole = [size for i, size in enumerate(self.lead) if i != self.axis]
        return tensor.expand(*outer[:first], *whole[first:], *tensor.shape[-3:]).flatten(0, -4)


def _told_heads(module: nn.Module) -> int | None:
    for place in (module, getattr(module, "config", None)):
        for name in _HEADS:
            found: Any = getattr(place, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None

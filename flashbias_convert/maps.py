"""Maps whose tokens are rows."""

from __future__ import annotations

import torch
from torch import Tensor


def with_channels_last(x: Tensor) -> Tensor:
    """A map (B, C, H, W) whose channels lie next to each other; the same one if they do already.

    What convolutions make of it does so, too, and queries, keys and values are rows that a kernel
    reads as they are. Compilers compute convolutions of whole models like that in any case, but
    give an operator what it gets in eager mode: with channels first they would turn all three
    around before each call.
    """
    return x.contiguous(memory_format=torch.channels_last)

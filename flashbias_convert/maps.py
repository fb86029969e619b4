"""Maps whose tokens are rows."""

from __future__ import annotations

import torch
from torch import Tensor


def with_channels_last(x: Tensor) -> Tensor:
    """A map (B, C, H, W) whose channels lie next to each other; the same one if they do already.

    What convolutions make of it does so, too, and queries, keys and values are rows that a kernel
    reads as they are. Compilers compute convolutions of whole models like that in any case, but
    give an operator what it gets in eager mode: with channels first they would turn all three
    around before each call. Under transforms of torch.func, which the kernels do not know, it is
    left as it is: `vmap` does not know this layout.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return x
    return x.contiguous(memory_format=torch.channels_last)

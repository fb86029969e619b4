"""A bias with its kernel-ready forms, made once and kept."""

from __future__ import annotations

import torch

from ..terms import ScoreBias
from .packing import PackedBias, pack


class PreparedBias:
    """A bias whose terms do not change between calls.

    Holds what `pack` makes of it, so that a call spends nothing on it. Make a new one when a
    tensor of the bias changes.

    Args:
        bias: the terms.
    """

    def __init__(self, bias: ScoreBias) -> None:
        self.bias = bias
        self._packed: dict[bool, PackedBias] = {}

    def packed(self, dtype: torch.dtype) -> PackedBias:
        """The form for q, k and v of `dtype`."""
        half = dtype in (torch.float16, torch.bfloat16)
        if half not in self._packed:
            self._packed[half] = pack(self.bias, half=half)
        return self._packed[half]

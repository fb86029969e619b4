"""A bias with its kernel-ready forms, made once and kept."""

from __future__ import annotations

import torch

from ..terms import ScoreBias
from .arguments import broadcasts
from .packing import PackedBias, pack, unsupported


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
        self._packed: dict[tuple[bool, float | None], PackedBias] = {}
        self._problems: dict[bool, str | None] = {}
        self._fits: set[tuple[object, ...]] = set()

    def packed(self, dtype: torch.dtype, scale: float | None) -> PackedBias:
        """The form that the kernel reads next to q, k and v of `dtype`; see `pack` for `scale`."""
        key = (_is_half(dtype), scale)
        if key not in self._packed:
            self._packed[key] = pack(self.bias, half=key[0], scale=scale)
        return self._packed[key]

    def problem(self, dtype: torch.dtype) -> str | None:
        """Why the kernel cannot add this bias, or None if it can."""
        half = _is_half(dtype)
        if half not in self._problems:
            self._problems[half] = unsupported(self.bias, half=half)
        return self._problems[half]

    def check_fits(self, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
        """Raise ValueError unless the terms fit a call of these sizes. Reads shapes only."""
        call = (batch, heads, n, m)
        if call not in self._fits:
            _check_fits(self.bias, batch, heads, n, m)
            self._fits.add(call)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


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

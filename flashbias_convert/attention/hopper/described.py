"""Tensors as they are described to the card, which copies tiles of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .rules import rows_of


class Tiles:
    """Tiles of tensors of one layout, zeros past their end.

    Args:
        shape, strides: of the tensors, without entries that are the same for all.
        block, layout: of a tile, and how it lies in shared memory.
    """

    def __init__(self, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        self.shape, self.strides, self.block, self.layout = shape, strides, block, layout
        #: what the descriptors have in common, once there was one
        self._common: dict[str, Any] | None = None

    def of(self, tensor: Tensor) -> Any:
        """What the kernel takes. The tensor begins where a card can copy from."""
        kind = _descriptor()
        if self._common is None:
            made = kind(tensor, self.shape, self.strides, self.block, self.layout)
            self._common = {name: value for name, value in vars(made).items() if name != "base"}
            return made
        # checks that hold for one of this layout hold for all, and take longer than the launch
        made = object.__new__(kind)
        made.__dict__.update(self._common, base=tensor)
        return made


def row_tiles(x: Tensor, rows: int) -> Tiles:
    """Tiles (1, 1, rows, columns) of tensors like this one, (H, N, columns) or with a batch."""
    from triton.experimental.gluon import language as gl

    x = x if x.dim() == 4 else x[None]
    for dim in (0, 1):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    block = [1, 1, rows, x.shape[-1]]
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return Tiles(list(x.shape), list(x.stride()), block, layout)


def key_tiles(x: Tensor, keys: int) -> tuple[Tiles, int, int]:
    """Tiles (1, keys) of the rows of a bias per key, see `rules.rows_of`.

    Returns:
        The tiles, rows from a batch entry to the next, and from a head to the next.
    """
    from triton.experimental.gluon import language as gl

    found = rows_of(x)
    assert found is not None
    row, per_entry, per_head = found
    b, h = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
    rows = 1 + (b - 1) * per_entry + (h - 1) * per_head
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return Tiles([rows, x.shape[-1]], [row, 1], [1, keys], layout), per_entry, per_head


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor

"""Tiles of a dense bias that the card copies by itself, ahead of the program that adds them.

Such a copy is described once per launch (the Tensor Memory Accelerator of Hopper and later cards).
It takes no registers for addresses, and what lies outside of the matrix reads as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .strides import VECTOR_BYTES

#: coordinates are 32-bit
_MOST_ROWS = 2**31 - 2**16


@dataclass(frozen=True)
class TileDescriptor:
    """A tensor as one matrix, and the tiles it is read in.

    Attributes:
        rows, columns: of the matrix.
        stride: elements from row to row.
        block: rows and columns of a tile.
    """

    rows: int
    columns: int
    stride: int
    block: tuple[int, int]

    def of(self, tensor: Tensor) -> Any | None:
        """What the kernel takes, or None where the tensor is not aligned."""
        if tensor.data_ptr() % VECTOR_BYTES:
            return None
        return _kind()(tensor, [self.rows, self.columns], [self.stride, 1], list(self.block))


def dense_tiles(dense: Tensor, block_m: int, block_n: int) -> TileDescriptor | None:
    """Describe a bias (*batch, H, N, M), or None where the card or the layout does not allow it.

    All its rows, of every head and batch entry, have to be rows of one matrix, none of which begins
    within another: the card's interface is specified for no others.
    """
    *lead, row, step = dense.stride()
    sizes = dense.shape[:-2]
    if dense.element_size() != 2 or not _copies_tiles(dense.device):
        return None
    if step != 1 or row < dense.shape[-1]:
        return None
    if row * dense.element_size() % VECTOR_BYTES or any(stride % row for stride in lead):
        return None
    before = sum((size - 1) * stride // row for size, stride in zip(sizes, lead, strict=True))
    rows = before + dense.shape[-2]
    if rows > _MOST_ROWS:
        return None
    return TileDescriptor(rows, dense.shape[-1], row, (block_m, block_n))


@cache
def _copies_tiles(device: torch.device) -> bool:
    """Whether it can; the interpreter and compiling ahead of time, on the CPU, do as if."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _kind() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor

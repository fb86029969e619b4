"""Maps in two or three dimensions that are padded, rolled and cut into windows (torchvision)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .terms import Regions
from .tracing import is_traced


@dataclass(frozen=True)
class WindowMap:
    """How a map is cut.

    Attributes:
        size: of the map, 2 or 3 numbers.
        window: of a window.
        shift: how far the map is rolled along each axis.
    """

    size: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows along each axis; the map is padded to fill them."""
        return tuple(-(-size // w) for size, w in zip(self.size, self.window, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """Size of the padded map."""
        return tuple(c * w for c, w in zip(self.counts, self.window, strict=True))

    @property
    def rolls(self) -> bool:
        """Whether tokens from opposite edges meet, so that a mask must part them."""
        return any(self.shift)

    def cut(self, x: Tensor) -> Tensor:
        """(B, *size, C) -> (B, nW, N, C); pads with zeros, which attention does not mask."""
        both = reversed(list(zip(self.size, self.padded, strict=True)))
        x = F.pad(x, (0, 0, *(n for size, full in both for n in (0, full - size))))
        if self.rolls:
            x = x.roll([-s for s in self.shift], self._axes())
        return self._windows(x)

    def join(self, x: Tensor) -> Tensor:
        """(B, nW, N, C) -> (B, *size, C); the inverse of `cut`."""
        dims = len(self.size)
        x = x.reshape(x.shape[0], *self.counts, *self.window, x.shape[-1])
        order = [axis for d in range(dims) for axis in (1 + d, 1 + dims + d)]
        x = x.permute(0, *order, 1 + 2 * dims).reshape(x.shape[0], *self.padded, x.shape[-1])
        if self.rolls:
            x = x.roll(self.shift, self._axes())
        return x[(slice(None), *(slice(size) for size in self.size))].contiguous()

    def regions(self, device: torch.device) -> Regions:
        """The shift mask: -100 between tokens of a window that the roll brought together."""
        return _regions(self, device) if is_traced() else _kept(self, device)

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(self.size)))

    def _windows(self, x: Tensor) -> Tensor:
        dims = len(self.size)
        cut = [n for pair in zip(self.counts, self.window, strict=True) for n in pair]
        x = x.reshape(x.shape[0], *cut, x.shape[-1])
        outer, inner = range(1, 2 * dims, 2), range(2, 2 * dims + 1, 2)
        x = x.permute(0, *outer, *inner, 1 + 2 * dims)
        return x.reshape(x.shape[0], math.prod(self.counts), math.prod(self.window), x.shape[-1])


def _regions(grid: WindowMap, device: torch.device) -> Regions:
    ids = torch.zeros((), dtype=torch.int32, device=device)
    for size, window, shift in zip(grid.padded, grid.window, grid.shift, strict=True):
        at = torch.arange(size, device=device)
        # an axis that is not rolled has one region
        region = (at >= size - window).int() + (at >= size - shift).int() if shift else 0 * at.int()
        ids = ids[..., None] * 3 + region
    # a width and a shift that are even part no two tokens 2 j and 2 j + 1 of a window
    even = grid.window[-1] % 2 == 0 and grid.shift[-1] % 2 == 0
    return Regions(ids=grid._windows(ids[None, ..., None])[0, ..., 0], pairs=even)


@lru_cache(maxsize=64)
def _kept(grid: WindowMap, device: torch.device) -> Regions:
    """Made once per size; nobody may change it."""
    with torch.inference_mode(False):
        return _regions(grid, device)

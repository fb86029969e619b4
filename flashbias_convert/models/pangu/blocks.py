"""Blocks of window attention and a multi-layer perceptron, and layers of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from .attention import EarthAttention3D
from .windows import Size3, half, pad_end, padded, partition, reverse, shift_mask, window_types


class Mlp(nn.Module):
    """Two linear layers with four times the channels between them."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1 = nn.Linear(dim, 4 * dim)
        self.linear2 = nn.Linear(4 * dim, dim)
        self.activation = nn.GELU()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., C) to the same shape."""
        x = self.drop(self.activation(self.linear1(x)))
        x = self.drop(self.linear2(x))
        return x


class EarthSpecificBlock(nn.Module):
    """Window attention and a perceptron, each normalised before it is added.

    Args:
        dim: C, number of channels.
        heads: H.
        resolution: of its map.
        window_size: of the attention.
        roll: shift the map by half a window first, and mask what does not belong together.
        drop_path: rate of stochastic depth.
        dropout: of the attention and of the perceptron.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        resolution: Size3,
        window_size: Size3,
        *,
        roll: bool,
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.resolution = resolution
        self.padded_resolution = padded(resolution, window_size)
        self.window_size = window_size
        self.roll = roll
        types = window_types(self.padded_resolution, window_size)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.linear = Mlp(dim, dropout)
        self.attention = EarthAttention3D(dim, heads, window_size, types, dropout)
        self.drop_path: nn.Module = DropPath(drop_path) if drop_path else nn.Identity()
        self._mask: Tensor | None = None

    def mask_for(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """What a shifted block adds to its scores, shape (1, T, N, N); None if it does not roll.

        It is made on first use and kept. It is no buffer: checkpoints do not hold it, and a model
        that was built on the meta device would keep garbage.
        """
        if not self.roll:
            return None
        if self._mask is None or self._mask.device != device or self._mask.dtype != dtype:
            shape, window = self.padded_resolution, self.window_size
            with torch.inference_mode(False):  # a later call may record gradients
                self._mask = shift_mask(shape, window, device=device, dtype=dtype)
        return self._mask

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EarthSpecificBlock:
        super()._apply(fn, recurse)
        if self._mask is not None:  # now, and not in the first call: compiled code would look twice
            weight = self.norm1.weight
            self._mask = None
            if not weight.is_meta:
                self.mask_for(weight.device, weight.dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of a map, shape (B, Z * H * W, C), to the same shape."""
        x = x + self.drop_path(self.norm1(self._attend(x)))
        x = x + self.drop_path(self.norm2(self.linear(x)))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        z, h, w = self.resolution
        back = half(self.window_size)
        away = tuple(-step for step in back)
        field = pad_end(x.unflatten(1, self.resolution), self.padded_resolution)
        if self.roll:
            field = field.roll(away, (1, 2, 3))
        windows = partition(field, self.window_size)
        windows = self.attention(windows, self.mask_for(x.device, x.dtype))
        field = reverse(windows, self.window_size, self.padded_resolution)
        if self.roll:
            field = field.roll(back, (1, 2, 3))
        return field[:, :z, :h, :w].flatten(1, 3)


class EarthSpecificLayer(nn.Module):
    """Blocks on one resolution, every second one shifted.

    Args:
        dim, heads, resolution, window_size, dropout: see `EarthSpecificBlock`.
        drop_path: one rate per block.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        resolution: Size3,
        window_size: Size3,
        drop_path: Sequence[float],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for i, rate in enumerate(drop_path):
            blocks[f"EarthSpecificBlock{i}"] = EarthSpecificBlock(
                dim,
                heads,
                resolution,
                window_size,
                roll=i % 2 == 1,
                drop_path=rate,
                dropout=dropout,
            )
        self.blocks = nn.Sequential(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, Z * H * W, C) to the same shape."""
        x = self.blocks(x)
        return x

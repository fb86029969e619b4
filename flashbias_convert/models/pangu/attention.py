"""Attention inside 3-D windows with the earth-specific position bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .windows import Size3


def earth_position_index(window_size: Size3) -> Tensor:
    """Which cells of a window's bias share one entry.

    Distances count along longitude alone; along levels and latitude the earth is not uniform, and
    each pair of positions has entries of its own.

    Args:
        window_size: levels, latitude, longitude: (wz, wh, ww).

    Returns:
        int64, shape (N, N) with N = wz * wh * ww, into a table of wz**2 * wh**2 * (2 * ww - 1)
        entries: query position + size * key position along levels and along latitude, query minus
        key along longitude.
    """
    wz, wh, ww = window_size
    axes = [torch.arange(size) for size in window_size]
    z, h, w = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    level = z[:, None] + wz * z[None, :]
    latitude = h[:, None] + wh * h[None, :]
    longitude = w[:, None] - w[None, :] + ww - 1
    return (level * wh * wh + latitude) * (2 * ww - 1) + longitude


class EarthAttention3D(nn.Module):
    """Multi-head attention over the tokens of each window; every window type has its own bias.

    Args:
        dim: C, number of channels.
        heads: H, a divisor of `dim`.
        window_size: levels, latitude, longitude; N is their product.
        type_of_windows: T.
        dropout: of the weights and of the output.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window_size: Size3,
        type_of_windows: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.head_number = heads
        self.scale = (dim // heads) ** -0.5
        self.window_size = window_size
        self.type_of_windows = type_of_windows
        n = math.prod(window_size)
        self.earth_specific_bias = nn.Parameter(torch.empty(1, type_of_windows, heads, n, n))
        nn.init.trunc_normal_(self.earth_specific_bias, std=0.02)
        self.linear1 = nn.Linear(dim, 3 * dim)
        self.linear2 = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention in every window.

        Args:
            x: shape (B * nLon, T, N, C).
            mask: is added to the scores, shape (nLon or 1, T, N, N).

        Returns:
            Tensor of the shape of `x`.
        """
        qkv = self.linear1(x).unflatten(-1, (3, self.head_number, -1))
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)  # (B * nLon, T, H, N, D)
        scores = (q * self.scale) @ k.transpose(-2, -1) + self.earth_specific_bias
        if mask is not None:
            by_longitude = scores.unflatten(0, (-1, mask.shape[0]))
            scores = (by_longitude + mask.unsqueeze(-3)).flatten(0, 1)
        weights = self.dropout(self.softmax(scores))
        out = (weights @ v).transpose(2, 3).flatten(3)
        out = self.dropout(self.linear2(out))
        return out

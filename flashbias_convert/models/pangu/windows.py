"""3-D windows on a map of (levels, latitude, longitude): padding, partition, shift mask.

Windows are numbered by type, which is their level and latitude, and all windows of one type,
around the globe, share one position bias.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: levels, latitude, longitude
Size3 = tuple[int, int, int]


def padded(shape: Size3, multiple: Size3) -> Size3:
    """`shape`, each axis rounded up to a multiple."""
    z, h, w = (-(-size // step) * step for size, step in zip(shape, multiple, strict=True))
    return z, h, w


def window_types(shape: Size3, window: Size3) -> int:
    """T: how many windows lie above and beside each other on a map of a padded shape."""
    return (shape[0] // window[0]) * (shape[1] // window[1])


def pad_end(x: Tensor, shape: Size3) -> Tensor:
    """Zeros behind each axis of a map (B, Z, H, W, C), up to `shape`."""
    z, h, w = (want - have for want, have in zip(shape, x.shape[1:4], strict=True))
    return F.pad(x, (0, 0, 0, w, 0, h, 0, z))


def partition(x: Tensor, window: Size3) -> Tensor:
    """A map (B, Z, H, W, C) as windows (B * nLon, T, N, C)."""
    b, z, h, w, c = x.shape
    wz, wh, ww = window
    x = x.reshape(b, z // wz, wz, h // wh, wh, w // ww, ww, c)
    x = x.permute(0, 5, 1, 3, 2, 4, 6, 7)  # (B, nLon, nZ, nH, wz, wh, ww, C)
    return x.reshape(b * (w // ww), window_types((z, h, w), window), math.prod(window), c)


def reverse(x: Tensor, window: Size3, shape: Size3) -> Tensor:
    """Inverse of `partition`: windows (B * nLon, T, N, C) as a map (B, *shape, C)."""
    (z, h, w), (wz, wh, ww) = shape, window
    x = x.reshape(-1, w // ww, z // wz, h // wh, wz, wh, ww, x.shape[-1])
    x = x.permute(0, 2, 4, 3, 5, 1, 6, 7)  # (B, nZ, wz, nH, wh, nLon, ww, C)
    return x.reshape(-1, z, h, w, x.shape[-1])


def half(window: Size3) -> Size3:
    """How far a shifted block rolls its map."""
    return window[0] // 2, window[1] // 2, window[2] // 2


def shift_mask(
    shape: Size3,
    window: Size3,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What keeps tokens apart that only the roll has brought into one window.

    Levels and latitudes end; longitudes close to a ring and are not cut, so one mask serves the
    windows of all longitudes.

    Args:
        shape: of the padded map.
        window: of the attention.
        device, dtype: of the result.

    Returns:
        Shape (1, T, N, N): 0 where tokens belong together, else -100. The value is finite: a
        masked token keeps a little attention where scores are large.
    """
    (z, h, _), (wz, wh, ww) = shape, window
    sz, sh, _ = half(window)
    regions = torch.zeros(z, h, device=device)
    levels = (slice(0, z - wz), slice(z - wz, z - sz), slice(z - sz, z))
    # The second slice starts at wh where h - wh would be right, as in the published weights'
    # reproduction. With two windows along latitude or more both give the same mask.
    latitudes = (slice(0, h - wh), slice(wh, h - sh), slice(h - sh, h))
    for at, (level, latitude) in enumerate((a, b) for a in levels for b in latitudes):
        regions[level, latitude] = at
    one_turn = regions[None, :, :, None, None].expand(1, z, h, ww, 1)
    ids = partition(one_turn, window)[..., 0]  # (1, T, N)
    apart = ids[..., :, None] != ids[..., None, :]
    return torch.zeros(apart.shape, device=device, dtype=dtype).masked_fill(apart, -100.0)

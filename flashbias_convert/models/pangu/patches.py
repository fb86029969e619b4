"""From fields on a grid to tokens and back. The surface becomes the lowest level of the map."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .windows import Size3


def patches(shape: Size3, patch_size: Size3) -> Size3:
    """Patches along the levels above the surface, latitude and longitude, rounded up."""
    z, h, w = (-(-size // step) for size, step in zip(shape, patch_size, strict=True))
    return z, h, w


def cut(fields: Tensor, patch_size: Size3) -> Tensor:
    """Fields (B, V, levels, lat, lon) as patches (B, V * cells of a patch, Z, H, W).

    Zeros are added behind the last level, latitude and longitude.
    """
    shape: Size3 = (fields.shape[2], fields.shape[3], fields.shape[4])
    (z, h, w), (pz, ph, pw) = patches(shape, patch_size), patch_size
    missing = (w * pw - shape[2], h * ph - shape[1], z * pz - shape[0])
    fields = F.pad(fields, (0, missing[0], 0, missing[1], 0, missing[2]))
    fields = fields.reshape(fields.shape[0], -1, z, pz, h, ph, w, pw)
    return fields.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def paste(cells: Tensor, patch_size: Size3, shape: Size3) -> Tensor:
    """Inverse of `cut`: (B, V * cells of a patch, Z, H, W) as fields (B, V, *shape)."""
    z, h, w = cells.shape[2:]
    pz, ph, pw = patch_size
    cells = cells.reshape(cells.shape[0], -1, pz, ph, pw, z, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    fields = cells.reshape(cells.shape[0], -1, z * pz, h * ph, w * pw)
    return fields[:, :, : shape[0], : shape[1], : shape[2]]


class PatchEmbedding(nn.Module):
    """One linear map for patches of the air, another for patches of the surface.

    Args:
        variables: fields per level, constant ones included.
        surface_variables: fields of the surface, constant ones included.
        patch_size: levels, latitude, longitude.
        dim: C, channels of a token.
    """

    def __init__(self, variables: int, surface_variables: int, patch_size: Size3, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.surface_patch: Size3 = (1, *patch_size[1:])
        self.conv = nn.Conv1d(variables * math.prod(patch_size), dim, 1)
        self.conv_surface = nn.Conv1d(surface_variables * math.prod(patch_size[1:]), dim, 1)

    def forward(self, air: Tensor, surface: Tensor) -> Tensor:
        """Tokens of both, the surface first.

        Args:
            air: shape (B, variables, levels, lat, lon).
            surface: shape (B, surface_variables, lat, lon).

        Returns:
            Tensor of shape (B, Z * H * W, C); Z counts the surface as one.
        """
        above = self.conv(cut(air, self.patch_size).flatten(2))
        below = self.conv_surface(cut(surface.unsqueeze(2), self.surface_patch).flatten(2))
        return torch.cat([below, above], -1).transpose(1, 2)


class PatchRecovery(nn.Module):
    """The inverse: tokens to fields, cropped to the grid.

    Args:
        dim: channels of a token.
        variables: fields per level.
        surface_variables: fields of the surface.
        patch_size: levels, latitude, longitude.
        shape: levels, latitudes and longitudes of the grid.
    """

    def __init__(
        self, dim: int, variables: int, surface_variables: int, patch_size: Size3, shape: Size3
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.surface_patch: Size3 = (1, *patch_size[1:])
        self.shape = shape
        self.conv = nn.Conv1d(dim, variables * math.prod(patch_size), 1)
        self.conv_surface = nn.Conv1d(dim, surface_variables * math.prod(patch_size[1:]), 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, Z * H * W, C) to fields (B, V, levels, lat, lon) and (B, Vs, lat, lon)."""
        z, h, w = patches(self.shape, self.patch_size)
        below, above = x.transpose(1, 2).split([h * w, z * h * w], -1)
        air = paste(self.conv(above).unflatten(2, (z, h, w)), self.patch_size, self.shape)
        ground = self.conv_surface(below).unflatten(2, (1, h, w))
        surface = paste(ground, self.surface_patch, (1, *self.shape[1:]))
        return air, surface.squeeze(2)

"""ERA-Interim fields, and the task that the small Pangu-Weather model learns on them.

The file holds geopotential and wind (z, u, v) at 200, 500 and 850 hPa, means of one January and
one July, on 241 x 480 points. Pairs of latitudes are averaged: 120 x 480. The lowest level stands
in for the surface. Half of all blocks of 8 x 8 points are hidden, all variables and levels alike,
and the model fills them in. A hidden token knows nothing but that it is hidden: where its visible
neighbours lie, only the position bias can tell it. 60 degrees of longitude are held out: training
never shows them and asks nothing about them, and errors are measured there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flashbias_convert.errors import UsageError

VARIABLES = ("z", "u", "v")
#: hPa, upwards; the first one is the surface of the model
LEVELS = (850, 500, 200)
LATITUDES, LONGITUDES = 241, 480
GRID = (120, 480)
#: columns of 0.75 degrees from 180 degrees west: 60 degrees west to the meridian
HELD_OUT = slice(160, 240)
#: points along latitude and longitude that are hidden together: 2 x 2 patches
BLOCK = 8
HIDDEN_SHARE = 0.5
#: hidden patterns for each month in the evaluation
PATTERNS = 4

#: 2.9 million parameters; 5 window types along latitude on the fine map, 3 on the coarse one
MODEL_ARGS: dict[str, Any] = {
    "variables": len(VARIABLES),
    "levels": len(LEVELS) - 1,
    "surface_variables": len(VARIABLES),
    "grid": list(GRID),
    "constants": 1,
    "surface_constants": 1,
    "patch_size": [2, 4, 4],
    "window_size": [2, 6, 12],
    "depths": [2, 2, 2, 2],
    "dims": [64, 128, 128, 64],
    "heads": [2, 4, 4, 2],
}


def read_fields(path: Path) -> Tensor:
    """Both months as they are, in SI units: fp32 (month, variable, level, 241, 480), level as
    in `LEVELS`, latitude from north to south.

    Raises:
        UsageError: no such file, or one with other variables, levels or sizes.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist", "eraint_uvz.nc is an example file of xarray")
    from scipy.io import netcdf_file  # an extra: pip install flashbias-convert[weather]

    with netcdf_file(path, mmap=False) as file:
        found = file.variables
        missing = {"level", "latitude", *VARIABLES} - set(found)
        if missing:
            raise UsageError(f"{path} lacks {', '.join(sorted(missing))}")
        levels = found["level"][:].tolist()
        if sorted(levels) != sorted(LEVELS) or found["latitude"][0] < 0:
            raise UsageError(f"{path} has levels {levels}, expected {LEVELS}, north first")
        order = [levels.index(level) for level in LEVELS]
        packed = [(found[name][:], found[name]) for name in VARIABLES]
        fields = np.stack([x[:, order] * v.scale_factor + v.add_offset for x, v in packed], 1)
    if fields.shape[1:] != (len(VARIABLES), len(LEVELS), LATITUDES, LONGITUDES):
        raise UsageError(f"{path} holds fields of shape {fields.shape}")
    return torch.from_numpy(fields.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Mean and standard deviation of each variable and level, shape (variable, level)."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, fields: Tensor) -> Normalisation:
        """Over both months and the longitudes that training sees."""
        seen = fields[..., ~held_out()].double()
        axes = (0, 3, 4)
        return cls(seen.mean(axes).float(), seen.std(axes).float())

    def apply(self, fields: Tensor) -> Tensor:
        """Fields (..., variable, level, lat, lon), normalised."""
        return (fields - self.mean[..., None, None]) / self.std[..., None, None]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the names of the axes."""
        return {
            "variables": list(VARIABLES),
            "levels": list(LEVELS),
            "surface_level": LEVELS[0],
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Normalisation:
        """Inverse of `to_json`."""
        return cls(torch.tensor(data["mean"]), torch.tensor(data["std"]))


def held_out() -> Tensor:
    """bool (480,): the columns that training does not see."""
    columns = torch.zeros(LONGITUDES, dtype=torch.bool)
    columns[HELD_OUT] = True
    return columns


def coarsen(fields: Tensor, first: int = 0) -> Tensor:
    """Means of pairs of latitudes from row 0 or 1 on: (..., 241, lon) to (..., 120, lon)."""
    rows = fields[..., first : first + 2 * GRID[0], :]
    return rows.unflatten(-2, (GRID[0], 2)).mean(-2)


def area() -> Tensor:
    """Weight of each row by its area, mean 1, shape (120, 1)."""
    edge = (LATITUDES - 1) / 2
    north = torch.arange(GRID[0], dtype=torch.float64) * 2 + 0.5
    weight = torch.cos((edge - north) / edge * math.pi / 2)
    return (weight / weight.mean()).float()[:, None]


def visible_blocks(batch: int, generator: torch.Generator) -> Tensor:
    """bool (batch, 120, 480) on the generator's device: True where a point is shown."""
    size = (batch, GRID[0] // BLOCK, GRID[1] // BLOCK)
    shown = torch.rand(size, generator=generator, device=generator.device) >= HIDDEN_SHARE
    return shown.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def fill_in(model: nn.Module, fields: Tensor, visible: Tensor) -> Tensor:
    """What the model makes of fields of which it sees a part.

    Args:
        model: a `PanguModel` of `MODEL_ARGS`, or one with the same inputs.
        fields: normalised, (B, variable, level, 120, 480).
        visible: bool, (B, 120, 480).

    Returns:
        Tensor of the shape of `fields`.
    """
    shown = visible[:, None, None].to(fields.dtype)
    seen = fields * shown
    flag = shown.expand(-1, 1, len(LEVELS) - 1, -1, -1)
    air, surface = model(seen[:, :, 1:], seen[:, :, 0], flag, shown[:, :, 0])
    return torch.cat([surface.unsqueeze(2), air], 2)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Both months with fixed hidden blocks.

    Attributes:
        fields: normalised, (B, variable, level, 120, 480).
        visible: bool, (B, 120, 480).
        scored: bool, (B, 120, 480): hidden points of the longitudes that were held out.
    """

    fields: Tensor
    visible: Tensor
    scored: Tensor

    @classmethod
    def of(cls, normalised: Tensor, device: torch.device) -> Evaluation:
        """The same on every device: patterns are drawn on the CPU from seed 0."""
        fields = coarsen(normalised).repeat_interleave(PATTERNS, 0)
        visible = visible_blocks(len(fields), torch.Generator().manual_seed(0))
        scored = ~visible & held_out()
        return cls(fields.to(device), visible.to(device), scored.to(device))

    @torch.no_grad()
    def predict(self, model: nn.Module) -> Tensor:
        """What a model fills in, one field at a time, as float64 on its device."""
        dtype = next(model.parameters()).dtype
        parts = zip(self.fields.split(1), self.visible.split(1), strict=True)
        return torch.cat([fill_in(model, f.to(dtype), v) for f, v in parts]).double()

    def rmse(self, predicted: Tensor) -> Tensor:
        """Root mean square error of scored points by area, float64 (variable, level)."""
        weight = (self.scored * area().to(self.scored.device))[:, None, None].double()
        squared = (predicted.double() - self.fields.double()).square() * weight
        return (squared.sum((0, 3, 4)) / weight.sum()).sqrt()

    def zonal_mean(self) -> Tensor:
        """The guess to beat: the mean of what is visible on the same latitude."""
        shown = self.visible[:, None, None].double()
        mean = (self.fields * shown).sum(-1, keepdim=True) / shown.sum(-1, keepdim=True).clamp(1)
        return mean.expand_as(self.fields)

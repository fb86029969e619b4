"""The whole model, for any grid; the defaults are those of the published weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from .blocks import EarthSpecificLayer
from .patches import PatchEmbedding, PatchRecovery, patches
from .resample import DownSample, UpSample, coarser
from .windows import Size3

#: Rate of stochastic depth of the last block; it grows evenly from 0 in the first.
DROP_PATH = 0.2


class PanguModel(nn.Module):
    """Pangu-Weather (Bi et al., Nature 619, 2023), with the names of its reproduction in PyTorch.

    State dicts of pangu-pytorch load strictly. Fields come in normalised; the published weights
    were trained with levels from 1000 hPa upwards and latitudes from north to south. The
    longitudes close to a ring where their number is a multiple of patch times window times two;
    otherwise zeros lie between the last and the first.

    Args:
        variables: fields per level.
        levels: pressure levels.
        surface_variables: fields of the surface.
        grid: latitudes and longitudes.
        constants: fields per level that come with each call and are not predicted.
        surface_constants: the same of the surface, such as land, soil and height.
        patch_size: levels, latitudes and longitudes of a patch.
        window_size: levels, latitudes and longitudes of a window, in patches.
        depths: blocks per layer. The first and the last layer are fine, the others coarse.
        dims: channels per layer; the two in the middle are equal.
        heads: attention heads per layer.
        drop_path: rate of stochastic depth of the last block.
        dropout: of attention and perceptrons.

    Raises:
        UsageError: sizes that make no model.
    """

    #: what `build` was called with, so that a saved model says how to build it again
    flashbias_arch: dict[str, Any] | None = None

    def __init__(
        self,
        *,
        variables: int = 5,
        levels: int = 13,
        surface_variables: int = 4,
        grid: tuple[int, int] = (721, 1440),
        constants: int = 1,
        surface_constants: int = 3,
        patch_size: Size3 = (2, 4, 4),
        window_size: Size3 = (2, 6, 12),
        depths: Sequence[int] = (2, 6, 6, 2),
        dims: Sequence[int] = (192, 384, 384, 192),
        heads: Sequence[int] = (6, 12, 12, 6),
        drop_path: float = DROP_PATH,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(variables=variables, levels=levels, surface_variables=surface_variables)
        _check_sizes(grid, patch_size, window_size)
        _check_layers(depths, dims, heads)
        self.variables, self.constants = variables, constants
        self.surface_variables, self.surface_constants = surface_variables, surface_constants
        self.shape: Size3 = (levels, *grid)
        z, h, w = patches(self.shape, patch_size)
        fine: Size3 = (z + 1, h, w)  # the surface lies below the lowest level
        coarse = coarser(fine)
        self._input_layer = PatchEmbedding(
            variables + constants, surface_variables + surface_constants, patch_size, dims[0]
        )
        self.downsample = DownSample(dims[0], dims[1], fine)
        rates = _drop_path_rates(depths, drop_path)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, resolution in enumerate((fine, coarse, coarse, fine)):
            layers[f"EarthSpecificLayer{i}"] = EarthSpecificLayer(
                dims[i], heads[i], resolution, window_size, rates[i], dropout
            )
        self.layers = nn.Sequential(layers)
        self.upsample = UpSample(dims[2], dims[3], fine)
        self._output_layer = PatchRecovery(
            dims[0] + dims[3], variables, surface_variables, patch_size, self.shape
        )
        self.apply(_initialise)

    def forward(
        self,
        air: Tensor,
        surface: Tensor,
        constants: Tensor | None = None,
        surface_constants: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict the fields at the next time, or whatever the weights were trained for.

        Args:
            air: normalised, shape (B, variables, levels, lat, lon).
            surface: normalised, shape (B, surface_variables, lat, lon).
            constants: shape (B or 1, constants, levels, lat, lon); None if there are none.
            surface_constants: shape (B or 1, surface_constants, lat, lon); None likewise.

        Returns:
            Tensors of the shapes of `air` and `surface`, normalised.

        Raises:
            UsageError: a shape that the model is not for.
        """
        known = _joined("air", air, constants, self.variables, self.constants, self.shape)
        below = _joined(
            "surface",
            surface,
            surface_constants,
            self.surface_variables,
            self.surface_constants,
            self.shape[1:],
        )
        encode, coarse_in, coarse_out, decode = self.layers
        skip = encode(self._input_layer(known, below))
        x = coarse_out(coarse_in(self.downsample(skip)))
        x = decode(self.upsample(x))
        out: tuple[Tensor, Tensor] = self._output_layer(torch.cat([skip, x], -1))
        return out

    def random_inputs(self, count: int, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """Normally distributed arguments of a call, for where nobody has weather at hand.

        Args:
            count: B, number of samples.
            generator: on the CPU.
        """
        given = (
            (count, self.variables, self.shape),
            (count, self.surface_variables, self.shape[1:]),
            (1, self.constants, self.shape),
            (1, self.surface_constants, self.shape[1:]),
        )
        return tuple(
            torch.randn(lead, fields, *shape, generator=generator) if fields else None
            for lead, fields, shape in given
        )


def build(**args: Any) -> PanguModel:
    """A `PanguModel` from JSON values: its arguments, with lists for tuples.

    Raises:
        UsageError: an argument that it does not have, or sizes that make no model.
    """
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
    try:
        model = PanguModel(**values)
        model.flashbias_arch = {"name": "pangu", "args": args}
        return model
    except TypeError as error:
        raise UsageError(f"cannot build a PanguModel: {error}") from error


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _drop_path_rates(depths: Sequence[int], last: float) -> list[list[float]]:
    """One rate per block, rising evenly over all layers."""
    count = sum(depths)
    rates = [last * i / max(count - 1, 1) for i in range(count)]
    starts = [sum(depths[:i]) for i in range(len(depths))]
    return [rates[start : start + depth] for start, depth in zip(starts, depths, strict=True)]


def _joined(
    name: str,
    fields: Tensor,
    constants: Tensor | None,
    variables: int,
    wanted: int,
    shape: tuple[int, ...],
) -> Tensor:
    """Fields and constants along the channels, checked."""
    if tuple(fields.shape[1:]) != (variables, *shape):
        raise UsageError(
            f"{name} must have shape {('B', variables, *shape)}, got {tuple(fields.shape)}"
        )
    found = () if constants is None else tuple(constants.shape[1:])
    if found != ((wanted, *shape) if wanted else ()):
        raise UsageError(
            f"the constants of {name} must have shape {('B', wanted, *shape)}, got "
            f"{None if constants is None else tuple(constants.shape)}"
        )
    if constants is None:
        return fields
    return torch.cat([fields, constants.expand(fields.shape[0], *found)], 1)


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"{name} must be a positive integer, got {count!r}")


def _check_sizes(grid: Sequence[int], patch_size: Sequence[int], window: Sequence[int]) -> None:
    sizes = {"grid": (grid, 2), "patch_size": (patch_size, 3), "window_size": (window, 3)}
    for name, (size, axes) in sizes.items():
        if len(size) != axes or min(size) < 1:
            raise UsageError(f"{name} must be {axes} positive integers, got {tuple(size)}")


def _check_layers(depths: Sequence[int], dims: Sequence[int], heads: Sequence[int]) -> None:
    for name, values in (("depths", depths), ("dims", dims), ("heads", heads)):
        if len(values) != 4 or min(values) < 1:
            raise UsageError(f"{name} must be 4 positive integers, got {tuple(values)}")
    if dims[1] != dims[2]:
        raise UsageError(f"the two dims in the middle must be equal, got {tuple(dims)}")
    if any(dim % count for dim, count in zip(dims, heads, strict=True)):
        raise UsageError(f"dims {tuple(dims)} must be multiples of heads {tuple(heads)}")

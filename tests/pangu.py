"""A small Pangu with random weights, and fields for it, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.models.pangu import EarthAttention3D, PanguModel, build

#: Windows of 24 tokens, 2 x 2 types and 2 around the globe on the fine map; padded maps.
SMALL: dict[str, Any] = {
    "variables": 3,
    "levels": 4,
    "surface_variables": 2,
    "grid": (23, 32),
    "constants": 1,
    "surface_constants": 2,
    "window_size": (2, 3, 4),
    "depths": (2, 2, 1, 1),
    "dims": (16, 32, 32, 16),
    "heads": (2, 4, 4, 2),
}


def randomise(model: nn.Module) -> None:
    """Weights at which the bias, the mask and the attention itself all matter."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
        if isinstance(module, EarthAttention3D):
            nn.init.normal_(module.linear1.weight, 0.0, 0.3)
            nn.init.normal_(module.linear1.bias, 0.0, 0.3)
            nn.init.normal_(module.earth_specific_bias)


def make(**changes: Any) -> PanguModel:
    """A model in eval mode with reproducible weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(**{**SMALL, **changes})
        randomise(model)
    return model.eval()


def fields(model: PanguModel, batch: int = 2) -> tuple[Tensor, ...]:
    """Normal numbers for a call: air, surface, constants, surface constants."""
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (batch, model.variables, *model.shape),
        (batch, model.surface_variables, *model.shape[1:]),
        (1, model.constants, *model.shape),
        (1, model.surface_constants, *model.shape[1:]),
    )
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@torch.no_grad()
def run(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Both outputs as one vector, computed in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    return torch.cat([out.flatten() for out in model(*(x.to(dtype) for x in inputs))])

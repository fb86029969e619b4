"""Pangu-Weather at full size; written by hand as an expert would."""

from __future__ import annotations

from typing import Any

import torch
from bench_pangu import fill, learned_biases
from torch import Tensor, nn

from flashbias_convert.models.pangu import EarthAttention3D, build

from .case import (
    EXACT,
    FLEX,
    NO_BIAS,
    NONE_CUDNN,
    ORIGINAL,
    OURS,
    ROOT,
    SDPA,
    SDPA_CUDNN,
    SVD_56,
    Case,
    converted,
    converted_at_rank,
    drawn,
)
from .hand import HandAttention, replace_children

#: where learned biases come from
EXAMPLE = ROOT / "examples/pangu_era_interim"


class HandEarthAttention(nn.Module):
    """`EarthAttention3D` whose bias and mask are added up beforehand, (T, H, N, N).

    Args:
        attention: the original.
        mask: of its block, (1, T, N, N), or None.
        way: see `HandAttention`.
    """

    def __init__(self, attention: EarthAttention3D, mask: Tensor | None, way: str) -> None:
        super().__init__()
        self.heads = attention.head_number
        self.linear1, self.linear2 = attention.linear1, attention.linear2
        added = attention.earth_specific_bias[0]
        added = added if mask is None else added + mask[0, :, None]
        self.attend = HandAttention(way, added, attention.scale)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.linear1(x).flatten(0, 1).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B * nLon * T, H, N, D)
        out = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return self.linear2(out.view(x.shape))


def by_hand(model: nn.Module, way: str) -> nn.Module:
    """Replace every window attention; the original bias is dropped."""

    def make(attention: EarthAttention3D, block: Any) -> nn.Module:
        bias = attention.earth_specific_bias
        return HandEarthAttention(attention, block.mask_for(bias.device, bias.dtype), way)

    return replace_children(model, EarthAttention3D, make)


def as_in_the_paper(model: nn.Module, rank: int) -> nn.Module:
    """Cut the biases of the fine scale, which has fewer heads; the others stay dense, in SDPA."""
    fewest = min(m.head_number for m in model.modules() if isinstance(m, EarthAttention3D))

    def make(attention: EarthAttention3D, block: Any) -> nn.Module:
        if attention.head_number == fewest:
            return attention
        bias = attention.earth_specific_bias
        return HandEarthAttention(attention, block.mask_for(bias.device, bias.dtype), SDPA)

    replace_children(model, EarthAttention3D, make)
    return converted_at_rank(model, rank, lambda site: site.earth_specific_bias[0])


def pangu(name: str, **args: Any) -> Case:
    """Pangu-Weather with random weights but for its position biases, batch 1."""
    levels, (latitudes, longitudes) = args.get("levels", 13), args.get("grid", (721, 1440))

    def make(device: torch.device) -> nn.Module:
        model = build(drop_path=0.0, **args)
        fill(model, learned_biases(EXAMPLE))
        return model.to(device)

    def inputs(_: Any, __: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        surface = (latitudes, longitudes)
        shapes = ((5, levels, *surface), (4, *surface), (1, levels, *surface), (3, *surface))
        return tuple(drawn(shape, count).to(device, dtype) for shape in shapes), {}

    def alter(model: nn.Module, way: str) -> nn.Module:
        if way == SVD_56:
            return as_in_the_paper(model, 56)
        return converted(model, way) if way in (OURS, EXACT) else by_hand(model, way)

    ways = (ORIGINAL, SDPA, SDPA_CUDNN, FLEX, NO_BIAS, NONE_CUDNN, EXACT, OURS, SVD_56)
    return Case(name, 1, 144, ways, make, inputs, alter)


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the names of the command line."""
    if tiny:
        args = {"levels": 3, "grid": (24, 48), "dims": (24, 48, 48, 24), "heads": (2, 4, 4, 2)}
        return {"pangu": pangu("pangu-tiny", depths=(2, 2, 2, 2), **args)}
    return {"pangu": pangu("Pangu-Weather 721 x 1440")}

"""Pangu-Weather: 3-D windows with an earth-specific bias, ours and that of pangu-pytorch."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.models.pangu import earth_position_index
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite

#: Levels of every map in pangu-pytorch: the surface and 7 patches of 13 levels.
LEVELS = 8


class PanguEarthAttention(PatchedAttention):
    """`EarthAttention3D` of either: the bias (T, H, N, N) serves the windows of all longitudes."""

    bypassed = ("softmax", "dropout")  # dropout also acts on the output, where it is called

    dim: int
    head_number: int
    scale: float
    window_size: tuple[int, int, int]
    earth_specific_bias: nn.Parameter
    linear1: nn.Linear
    linear2: nn.Linear
    dropout: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.earth_specific_bias, tuple(self.window_size))

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.linear1(x).unflatten(-1, (3, self.head_number, -1))  # (B * nLon, T, N, 3, H, D)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)  # views, (B * nLon, T, H, N, D)
        out = attend_windows(self.score_bias, q, k, v, mask, scale=self.scale)
        out = self.linear2(out.transpose(2, 3).flatten(3))
        return self.dropout(out)


def describe(site: Site) -> Description:
    """The dense parameter as it is; its index finds the table in it if it has the structure."""
    module: Any = site.module
    bias = getattr(module, "earth_specific_bias", None)
    if not isinstance(bias, Tensor) or bias.dim() != 5 or len(bias) != 1:
        raise UnsupportedSite(
            "it has no earth_specific_bias of shape (1, T, H, N, N), as the class of this name in "
            "pangu-pytorch has"
        )
    masks, warnings = planned_mask(_shift_mask(site))
    heads, n = bias.shape[2:4]
    return Description(
        bias=bias[0],
        num_heads=heads,
        n=n,
        m=n,
        head_dim=module.dim // heads,
        index=earth_position_index(tuple(module.window_size)),
        exact_terms=masks,
        warnings=warnings,
    )


def _shift_mask(site: Site) -> Tensor | None:
    """What the block around the attention will pass, shape (1, T, N, N), or None.

    A mask that this does not foresee is added as it arrives.
    """
    block: Any = site.parent
    bias: Tensor = site.module.earth_specific_bias  # type: ignore[assignment]
    if hasattr(block, "mask_for"):
        mask: Tensor | None = block.mask_for(bias.device, bias.dtype)
    elif hasattr(block, "gen_mask") and _is_shifted(site):
        mask = _generated(block)
    else:
        mask = None
    return None if mask is None else mask.to(bias.device)


def _is_shifted(site: Site) -> bool:
    """Whether pangu-pytorch rolls the block: every second of a layer, counted by its name."""
    number = re.search(r"EarthSpecificBlock(\d+)\.[^.]*$", site.name)
    return number is not None and int(number[1]) % 2 == 1


def _generated(block: Any) -> Tensor | None:
    """The mask of one window per type; it is the same at all longitudes."""
    levels, latitudes, longitudes = block.window_size
    above = LEVELS // levels
    beside, rest = divmod(block.type_of_windows, above)
    if rest:
        return None
    mask: Tensor = block.gen_mask(torch.empty(1, LEVELS, beside * latitudes, longitudes, 1))
    return mask


recipe = Recipe(
    name="pangu",
    title="Pangu-Weather (flashbias-convert and pangu-pytorch)",
    classes=(
        "flashbias_convert.models.pangu.attention.EarthAttention3D",
        "models.layers.EarthAttention3D",
    ),
    library="flashbias-convert",
    tested=">=0.1,<1",
    attention=PanguEarthAttention,
    describe=describe,
    about=About(
        models=(
            "Pangu-Weather, any grid: `flashbias_convert.models.pangu`, and the class of "
            "pangu-pytorch"
        ),
        exact="shift mask; with `--method exact` the earth-specific bias, too",
        truncated="earth-specific bias, with `svd`; `auto` keeps it exact",
        n="window: 144",
        tested="torch 2.11 to 2.14",
    ),
)

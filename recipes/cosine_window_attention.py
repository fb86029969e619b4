"""Swin Transformer V2's window attention outside of timm: Microsoft's own class, and copies of it.

As of `window_attention`, a module counts as one if it has the parts and computes what they suggest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite
from flashbias_convert.relative_positions import log_coordinates, window_index
from flashbias_convert.tables import (
    continuous_bias,
    cosine_scale,
    describe_windows,
    require_coordinates,
    require_index,
    require_plain_layers,
)
from flashbias_convert.trial import Trial, has_parts, try_windows

from .timm_swinv2 import SwinV2WindowAttention


class CosineWindowAttention(SwinV2WindowAttention):
    """`WindowAttention` with `cpb_mlp`: (x, mask). Keys have no bias, and no buffer for one."""

    head_values: ClassVar[tuple[str, ...]] = ("logit_scale", "q_bias", "v_bias")

    def _project_qkv(self, x: Tensor) -> Tensor:
        return project_qkv(self, x)


def project_qkv(module: Any, x: Tensor) -> Tensor:
    """Queries, keys and values of tokens, (B * nW, N, 3 C); the bias of keys is zero."""
    if module.q_bias is None:
        return F.linear(x, module.qkv.weight)
    bias = torch.cat((module.q_bias, torch.zeros_like(module.v_bias), module.v_bias))
    return F.linear(x, module.qkv.weight, bias)


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    tensors = ("logit_scale", "relative_coords_table", "relative_position_index")
    return (
        has_parts(module, *tensors, kind=Tensor)
        and has_parts(module, "cpb_mlp", "qkv", "proj", "proj_drop", kind=nn.Module)
        and has_parts(module, "window_size", "pretrained_window_size", kind=Sequence)
        and has_parts(module, "num_heads", "q_bias", "v_bias")
        and module.logit_scale.numel() == module.num_heads
        and len(module.window_size) == len(module.pretrained_window_size) == 2
    )


def describe(site: Site) -> Description:
    """The position bias from the module's own layers, after a trial whether it computes that.

    Raises:
        UnsupportedSite: it computes something else, or its buffers are not those of its window.
    """
    module: Any = site.module
    require_plain_layers(module.cpb_mlp, module.cpb_mlp)  # torch's own, not those of its library
    window, trained = module.window_size, module.pretrained_window_size
    index, coordinates = module.relative_position_index, module.relative_coords_table
    require_index(index, window_index(window))
    require_coordinates(coordinates, log_coordinates(window, trained if trained[0] > 0 else window))
    if not isinstance(module.qkv, nn.Linear) or module.qkv.bias is not None:
        raise UnsupportedSite("its `qkv` is no linear layer without a bias of its own")
    _try_out(module)
    bias, warnings = continuous_bias(module.cpb_mlp, coordinates, index, module.num_heads)
    return describe_windows(site, bias, index, module.qkv.in_features, warnings, cosine=True)


def _try_out(module: Any) -> None:
    """Raise UnsupportedSite unless the forward is cosine attention with that bias and a mask."""
    trial = Trial(module, "cosine attention in windows")
    twin = trial.twin
    for parameter in twin.parameters():
        trial.redraw(parameter, parameter[0].numel() ** -0.5 if parameter.dim() == 2 else 1.0)
    twin.logit_scale.add_(3.0)  # on both sides of the clamp
    coordinates, index = twin.relative_coords_table, twin.relative_position_index
    bias, _ = continuous_bias(twin.cpb_mlp, coordinates, index, twin.num_heads)
    scale = cosine_scale(twin.logit_scale)
    try_windows(trial, bias, project=partial(project_qkv, twin), scale=scale, cosine=True)


recipe = Recipe(
    name="cosine_window_attention",
    title="Swin Transformer V2's window attention of any repository",
    classes=("*.WindowAttention:cosine",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=CosineWindowAttention,
    describe=describe,
    matches=looks_like_it,
    about=About(
        models=(
            "Swin Transformer V2 in Microsoft's own code and copies of it: classes of this name "
            "with `cpb_mlp` and `logit_scale`, which are tried out first"
        ),
        exact=(
            "shift mask, cosine attention, logit scales; with `--method exact` the position "
            "bias, too"
        ),
        truncated="position bias",
        n="window: 64 to 576",
        tested="spandrel 0.4 (Swin2SR), a class of the same interface as Microsoft's",
    ),
)

"""Swin, Swin V2 and Video Swin of torchvision: attention that cuts its map into windows itself."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import continuous_bias, cosine_scale, require_plain_layers
from flashbias_convert.terms import Dense
from flashbias_convert.window_map import WindowMap


class ShiftedWindowAttention(PatchedAttention):
    """`ShiftedWindowAttention`, its V2 with cosine attention, and its version in 3-D."""

    bypassed = ("cpb_mlp",)

    window_size: list[int]
    shift_size: list[int]
    num_heads: int
    qkv: nn.Linear
    proj: nn.Linear
    relative_position_index: Tensor
    relative_position_bias_table: nn.Parameter  # of all but V2, which has the next three
    cpb_mlp: nn.Sequential
    relative_coords_table: Tensor
    logit_scale: nn.Parameter

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        size = tuple(self.window_size)
        if not self._is_cosine():
            return (self.relative_position_bias_table, self.relative_position_index, size)
        made = (self.relative_coords_table, self.logit_scale, self.relative_position_index)
        return (*self.cpb_mlp.parameters(), *made, size)

    def used_sources(self) -> tuple[Tensor, ...]:
        return (self.logit_scale,) if self._is_cosine() else ()

    def scale_bound(self) -> float | None:
        if not self._is_cosine() or self.logit_scale.is_meta:
            return None
        return float(cosine_scale(self.logit_scale.detach()).max())

    def flashbias_forward(self, x: Tensor) -> Tensor:
        grid = self._grid(tuple(x.shape[1:-1]))
        x = grid.cut(x)  # (B, nW, N, C)
        qkv = F.linear(x, self.qkv.weight, self._qkv_bias())
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)
        call: dict[str, Any] = {"extra": (), "scale": q.shape[-1] ** -0.5}
        if self._is_cosine():
            scale = self.sealed("scale", self.logit_scale, cosine_scale)
            call |= {"scale": scale, "cosine": True}
        if grid.window != tuple(self.window_size):  # the input is smaller
            bias = self.get_relative_position_bias(list(grid.window))  # type: ignore[operator]
            call["extra"] = (Dense(bias=bias[0]),)
            call["without"] = tuple(term.kind for term in self.score_bias.bias.terms)
        if grid.rolls:
            call["extra"] += (grid.regions(x.device),)
        out = self.score_bias(q, k, v, **call).transpose(-3, -2).flatten(-2)
        return grid.join(F.linear(out, self.proj.weight, self.proj.bias))

    def _is_cosine(self) -> bool:
        return hasattr(self, "logit_scale")

    def _grid(self, size: tuple[int, ...]) -> WindowMap:
        """A window that holds the whole axis is not rolled along it; in 3-D it shrinks, too."""
        window = tuple(self.window_size)
        whole = [s <= w for s, w in zip(size, window, strict=True)]
        shift = tuple(0 if w else s for w, s in zip(whole, self.shift_size, strict=True))
        if len(size) == 3:
            window = tuple(min(pair) for pair in zip(size, window, strict=True))
        return WindowMap(size, window, shift)

    def _qkv_bias(self) -> Tensor | None:
        bias: Tensor | None = self.qkv.bias
        if bias is None or not self._is_cosine():
            return bias
        bias = bias.clone()
        bias.view(3, -1)[1] = 0  # keys have none, whatever the parameter holds
        return bias


def describe(site: Site) -> Description:
    """The position bias by the module's own code; masks follow from the size of each call."""
    module: Any = site.module
    window = module.window_size
    n = math.prod(window)
    index = module.relative_position_index.view(n, n)
    warnings: tuple[str, ...] = ()
    cosine = hasattr(module, "cpb_mlp")
    if cosine:
        require_plain_layers(module.cpb_mlp, module)
        table, heads = module.relative_coords_table, module.num_heads
        bias, warnings = continuous_bias(module.cpb_mlp, table, index, heads)
    else:
        given = (window,) if len(window) == 3 else ()
        bias = module.get_relative_position_bias(*given)[0]
    return Description(
        bias=bias,
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.qkv.in_features // module.num_heads,
        index=index,
        warnings=warnings,
        shared=not cosine and not any(module.shift_size),
    )


_MODULE = "torchvision.models"

recipe = Recipe(
    name="torchvision_swin",
    title="Swin, Swin V2, Video Swin (torchvision)",
    classes=(
        f"{_MODULE}.swin_transformer.ShiftedWindowAttention",
        f"{_MODULE}.swin_transformer.ShiftedWindowAttentionV2",
        f"{_MODULE}.video.swin_transformer.ShiftedWindowAttention3d",
    ),
    library="torchvision",
    tested=">=0.29,<0.30",
    attention=ShiftedWindowAttention,
    describe=describe,
    about=About(
        models="Swin, Swin V2 and Video Swin, any input size",
        exact="shift mask; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49, 64, 392",
    ),
)

"""Pangu and FengWu layers of NVIDIA PhysicsNeMo: windows with an earth-specific position bias."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.decompose import check_index
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site

#: The module has moved between versions; the code of the two classes has not changed.
MODULES = (
    "physicsnemo.nn.module.attention_layers",
    "physicsnemo.models.layers.attention_layers",
    "modulus.models.layers.attention_layers",
)


class PhysicsNeMoEarthAttention(PatchedAttention):
    """`EarthAttention3D` and `EarthAttention2D`, which differ in their index alone.

    The originals put heads before window types; here window types are part of the batch, so that
    the windows of all longitudes share one bias (T, H, N, N).
    """

    bypassed = ("softmax", "attn_drop")

    num_heads: int
    scale: float
    window_size: tuple[int, ...]
    earth_position_bias_table: nn.Parameter
    earth_position_index: Tensor
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        sizes = tuple(self.window_size)
        return (self.earth_position_bias_table, self.earth_position_index, sizes)

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B * nLon, T, N, 3, H, D)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)  # views, (B * nLon, T, H, N, D)
        out = attend_windows(self.score_bias, q, k, v, mask, scale=self.scale)
        out = self.proj(out.transpose(2, 3).flatten(3))
        return self.proj_drop(out)


def describe(site: Site) -> Description:
    """The bias as the module gathers it, and the shift mask that its block keeps.

    The mask is cut along longitude, too, where a shifted window would wrap around: it differs
    between longitudes.
    """
    module: Any = site.module
    table = module.earth_position_bias_table  # (entries, T, H)
    n = len(module.earth_position_index)
    index = check_index(module.earth_position_index, n, n, size=len(table), name=site.name)
    masks, warnings = planned_mask(getattr(site.parent, "attn_mask", None))
    return Description(
        bias=table[index].permute(2, 3, 0, 1),
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.dim // module.num_heads,
        index=index,
        exact_terms=masks,
        warnings=warnings,
    )


recipe = Recipe(
    name="physicsnemo_pangu",
    title="Pangu and FengWu layers (NVIDIA PhysicsNeMo)",
    classes=tuple(f"{m}.{c}" for m in MODULES for c in ("EarthAttention3D", "EarthAttention2D")),
    library="nvidia-physicsnemo",
    tested=">=1.3,<2.3",
    attention=PhysicsNeMoEarthAttention,
    describe=describe,
    about=About(
        models="Pangu and FengWu attention of NVIDIA PhysicsNeMo, 3-D and 2-D",
        exact="shift mask; with `--method exact` the earth-specific bias, too",
        truncated="earth-specific bias, with `svd`; `auto` keeps it exact",
        n="window: 144, 72",
        tested=(
            "attention classes of physicsnemo 1.3 and 2.2, their dependencies replaced by stand-ins"
        ),
    ),
)

"""Attention in windows with a table of relative positions, as many repositories have it.

Copies of Swin's module go by the name `WindowAttention`: Microsoft's own, SwinIR's, HAT's, that of
3-D networks. A module counts as one if it has the parts, and if it computes what they suggest.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.handed_index import HandedIndexAttention
from flashbias_convert.masks import attend_windows
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite
from flashbias_convert.relative_positions import table_entries, window_index, window_of
from flashbias_convert.tables import describe_windows
from flashbias_convert.trial import Trial, has_parts, try_windows

#: how forwards that are handed an index call it
INDEX_NAMES = ("rpi", "relative_position_index")


class TableWindowAttention(HandedIndexAttention):
    """`WindowAttention`: (x, mask), or (x, index, mask) where the network keeps one index."""

    bypassed = ("attn_drop", "softmax")

    num_heads: int
    scale: float
    window_size: Any
    relative_position_bias_table: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.relative_position_bias_table, *own_index(self), window_of(self))

    def usual_index(self) -> Tensor:
        return window_index(window_of(self))

    def flashbias_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.original_class.forward).bind(self, x, *args, **kwargs)
        windows, n, _ = x.shape  # (B * nW, N, C)
        index = next((v for k, v in given.arguments.items() if k in INDEX_NAMES), None)
        if n != math.prod(window_of(self)) or not (index is None or self.is_usual(index)):
            return self.original_forward(x, *args, **kwargs)
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        mask = given.arguments.get("mask")
        out = attend_windows(self.score_bias, q, k, v, mask, scale=self.scale)
        out = self.proj(out.transpose(1, 2).flatten(2))
        drop = self._modules.get("proj_drop")
        return out if drop is None else drop(out)


def own_index(module: nn.Module) -> tuple[Tensor, ...]:
    """The module's own index, if it has one."""
    found = module._buffers.get("relative_position_index")
    return () if found is None else (found,)


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    parts = has_parts(module, "num_heads", "scale", "window_size")
    parts &= has_parts(module, "qkv", "proj", kind=nn.Linear)
    if not parts or not has_parts(module, "relative_position_bias_table", kind=nn.Parameter):
        return False
    dim, heads = module.qkv.in_features, module.num_heads
    table = (table_entries(window_of(module)), heads)
    fits = module.qkv.out_features == 3 * dim and dim % heads == 0
    return fits and tuple(module.relative_position_bias_table.shape) == table


def describe(site: Site) -> Description:
    """The table by the usual index, after a trial whether the module computes that."""
    module: Any = site.module
    index = window_index(window_of(module))
    if not all(torch.equal(own.flatten().cpu(), index.flatten()) for own in own_index(module)):
        raise UnsupportedSite("its index of relative positions is not the usual one")
    _try_out(module, index)
    table = module.relative_position_bias_table
    index = index.to(table.device)
    return describe_windows(site, table[index].permute(2, 0, 1), index, module.qkv.in_features)


def _try_out(module: Any, index: Tensor) -> None:
    """Raise UnsupportedSite unless the forward is attention with that table and a mask."""
    trial = Trial(module, "attention in windows")
    table = trial.twin.relative_position_bias_table
    trial.redraw(table)
    names = inspect.signature(type(module).forward).parameters
    handed = {name: index for name in INDEX_NAMES if name in names}
    try_windows(trial, table[index].permute(2, 0, 1), handed=handed, scale=trial.twin.scale)


recipe = Recipe(
    name="window_attention",
    title="Swin-like window attention of any repository",
    classes=("*.WindowAttention",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=TableWindowAttention,
    describe=describe,
    matches=looks_like_it,
    about=About(
        models=(
            "Swin of Microsoft, SwinIR, HAT and others: classes of "
            "this name with a table, a window and `qkv`, which are tried out first"
        ),
        exact="shift mask; with `--method exact` the position bias, too",
        truncated="position bias",
        n="window: 49 to 343",
        tested="spandrel 0.4 (SwinIR, HAT), classes of the same interface",
    ),
)

"""HAT's overlapping cross-attention: windows of queries attend to larger windows around them.

Keys beyond the edge of the map are zeros that nothing hides. The network hands over an index whose
negative numbers count from the end of the table. A module counts as such a block if it has the
parts, and if it computes what they suggest: it is tried out with random numbers first.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.fallback import say_original
from flashbias_convert.handed_index import HandedIndexAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.trial import Trial, has_parts, plain_attention

#: why a call runs the original
OTHER_INDEX = "an overlapping block of HAT is handed another index than the usual one"


class OverlappingAttention(HandedIndexAttention):
    """`OCAB`, a whole block: (x, x_size, rpi)."""

    bypassed = ("softmax",)

    num_heads: int
    scale: float
    window_size: int
    overlap_win_size: int
    relative_position_bias_table: nn.Parameter
    norm1: nn.Module
    qkv: nn.Linear
    unfold: nn.Unfold
    proj: nn.Linear
    norm2: nn.Module
    mlp: nn.Module

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.relative_position_bias_table, self.window_size, self.overlap_win_size)

    def usual_index(self) -> Tensor:
        return overlap_index(self)

    def flashbias_forward(self, x: Tensor, x_size: tuple[int, int], rpi: Tensor) -> Tensor:
        if not self.is_usual(rpi):
            say_original(OTHER_INDEX)
            original: Tensor = self.original_forward(x, x_size, rpi)
            return original
        (height, width), side = x_size, self.window_size
        rows, columns = height // side, width // side
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))  # (B, h w, 3, H, D)
        q = qkv[:, :, 0].unflatten(1, (rows, side, columns, side)).permute(0, 1, 3, 5, 2, 4, 6)
        q = q.flatten(4, 5).flatten(1, 2)  # (B, nW, H, N, D)
        kv = qkv[:, :, 1:].flatten(2).transpose(1, 2).unflatten(-1, (height, width))
        cut = self.unfold(kv).unflatten(1, (2, self.num_heads, q.shape[-1], -1))
        k, v = cut.permute(1, 0, 5, 2, 4, 3).contiguous().unbind(0)  # (B, nW, H, M, D)
        out = self.score_bias(q, k, v, scale=self.scale)
        out = out.unflatten(1, (rows, columns)).unflatten(4, (side, side))
        out = out.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(1, 4)  # (B, h w, C)
        x = x + self.proj(out)
        return x + self.mlp(self.norm2(x))


def overlap_index(module: Any) -> Tensor:
    """The place of each pair in the table, (N, M), as HAT counts: negative ones from the end."""
    side, larger = module.window_size, module.overlap_win_size
    offset = torch.arange(larger)[None, :] - torch.arange(side)[:, None] + side - larger + 1
    rows = offset[:, None, :, None] * (side + larger - 1)  # (q row, 1, key row, 1)
    return (rows + offset[None, :, None, :]).reshape(side**2, larger**2)


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    parts = has_parts(module, "qkv", "proj", kind=nn.Linear)
    parts &= has_parts(module, "norm1", "norm2", "mlp", "unfold", kind=nn.Module)
    parts &= has_parts(module, "window_size", "overlap_win_size", kind=int)
    parts &= has_parts(module, "relative_position_bias_table", kind=nn.Parameter)
    if not parts or not has_parts(module, "scale", "num_heads"):
        return False
    entries = (module.window_size + module.overlap_win_size - 1) ** 2
    return tuple(module.relative_position_bias_table.shape) == (entries, module.num_heads)


def describe(site: Site) -> Description:
    """The table by HAT's index, after a trial whether the module computes that."""
    module: Any = site.module
    index = overlap_index(module)
    _try_out(module, index)
    table = module.relative_position_bias_table
    n, m = index.shape
    return Description(
        bias=table[index.to(table.device)].permute(2, 0, 1),
        num_heads=module.num_heads,
        n=n,
        m=m,
        head_dim=module.qkv.in_features // module.num_heads,
        index=(index - index.min()).to(table.device),
    )


def _try_out(module: Any, index: Tensor) -> None:
    """Raise UnsupportedSite unless the block is attention with that table, and what follows it."""
    trial = Trial(module, "an overlapping block of HAT")
    twin, table = trial.twin, trial.twin.relative_position_bias_table
    side, larger, heads = twin.window_size, twin.overlap_win_size, twin.num_heads
    x = trial.draw(1, 2 * side * side, twin.qkv.in_features)
    trial.redraw(table)
    q, k, v = twin.qkv(twin.norm1(x)).view(2, side, side, 3, -1).unbind(3)  # windows one by one
    edge = (larger - side) // 2
    around = [F.pad(t.flatten(0, 1), (0, 0, edge, edge, edge, edge)) for t in (k, v)]
    bias, parts = table[index].permute(2, 0, 1), []
    for window in range(2):
        seen = [t[window * side : window * side + larger].flatten(0, 1) for t in around]
        three = (q[window].flatten(0, 1), *seen)
        mine, keys, values = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in three)
        parts.append(plain_attention(mine, keys, values, bias, scale=twin.scale))
    right = x + twin.proj(torch.cat(parts))
    right = right + twin.mlp(twin.norm2(right))
    trial.require(lambda: twin(x, (2 * side, side), index), right)


recipe = Recipe(
    name="hat_overlap",
    title="HAT's overlapping cross-attention, of any repository",
    classes=("*.OCAB",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=OverlappingAttention,
    describe=describe,
    matches=looks_like_it,
    about=About(
        models="HAT's overlapping blocks, which are tried out first",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 256 x 576",
        tested="spandrel 0.4 (HAT), classes of the same interface",
    ),
)

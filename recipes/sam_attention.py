"""Attention of SAM's image encoder, as many repositories have it: two tables, rows and columns.

Facebook's segment-anything calls its class `Attention`, and so do its copies. A module counts as
one if it has the parts, and if it computes what they suggest: its forward is run with random
numbers, on maps of two sizes, beside attention that is written out.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site
from flashbias_convert.trial import Trial, has_parts, plain_attention


class SamLikeAttention(PatchedAttention):
    """`Attention` of segment-anything; the bias is made of queries that are not scaled."""

    bypassed = ("attn_drop",)

    num_heads: int
    scale: float
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the rows are made anew in each call

    def flashbias_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # nothing that was tried out
            return self.original_forward(x, *args, **kwargs)
        q, k, v = project(self, x)
        rel_h, rel_w = relative(x.shape[1], self.rel_pos_h), relative(x.shape[2], self.rel_pos_w)
        built = {"axial_rows": {"q": q, "rel_h": rel_h, "rel_w": rel_w}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        out = self.proj(out.transpose(1, 2).flatten(2)).unflatten(1, x.shape[1:3])
        drop = self._modules.get("proj_drop")
        return out if drop is None else drop(out)


def project(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a map (B, H, W, C): views, (B, heads, H * W, D)."""
    qkv = module.qkv(x.flatten(1, 2)).unflatten(-1, (3, module.num_heads, -1))
    views: tuple[Tensor, ...] = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return views


def relative(size: int, table: Tensor) -> Tensor:
    """What belongs to each pair of rows, (size, size, D), from a table (2 L - 1, D).

    Interpolated if `size` is not L.
    """
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place[None, :] + size - 1]


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    parts = has_parts(module, "qkv", "proj", kind=nn.Linear) and has_parts(module, "scale")
    if not parts or not has_parts(module, "num_heads", kind=int):
        return False
    dim, heads = module.proj.in_features, module.num_heads
    if module.qkv.out_features != 3 * dim or dim % heads or not has_parts(module, "use_rel_pos"):
        return False
    if not module.use_rel_pos:
        return True
    if not has_parts(module, "rel_pos_h", "rel_pos_w", kind=nn.Parameter):
        return False
    shapes = [tuple(table.shape) for table in (module.rel_pos_h, module.rel_pos_w)]
    return all(len(s) == 2 and s[0] % 2 == 1 and s[1] == dim // heads for s in shapes)


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call, after a trial of the forward."""
    module: Any = site.module
    if not module.use_rel_pos:
        raise NoBias("it uses no relative positions")
    _try_out(module)
    n = ((len(module.rel_pos_h) + 1) // 2) * ((len(module.rel_pos_w) + 1) // 2)
    size = module.rel_pos_h.shape[1]
    return Description(None, module.num_heads, n, n, size, builders=("axial_rows",))


def _try_out(module: Any) -> None:
    """Raise UnsupportedSite unless the forward is attention with rows and columns.

    Of a small map: scores of SAM's own, 4096 x 4096 a head, would fill the memory.
    """
    trial = Trial(module, "SAM's attention")
    twin, size = trial.twin, module.rel_pos_h.shape[1]
    for name, entries in (("rel_pos_h", 7), ("rel_pos_w", 9)):
        setattr(twin, name, nn.Parameter(trial.draw(entries, size), requires_grad=False))
    for height, width in ((4, 5), (6, 3)):  # those of the tables, and others
        x = trial.draw(2, height, width, twin.qkv.in_features)
        trial.require(partial(twin, x), _written_out(twin, x))


def _written_out(module: Any, x: Tensor) -> Tensor:
    (height, width), (q, k, v) = x.shape[1:3], project(module, x)
    grid = q.unflatten(-2, (height, width))
    rows = torch.einsum("bnyxd,ykd->bnyxk", grid, relative(height, module.rel_pos_h))
    columns = torch.einsum("bnyxd,xkd->bnyxk", grid, relative(width, module.rel_pos_w))
    bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2).flatten(2, 3)
    out = plain_attention(q, k, v, bias, scale=module.scale)
    found: Tensor = module.proj(out).unflatten(1, (height, width))
    return found


recipe = Recipe(
    name="sam_attention",
    title="SAM-like attention of any repository",
    classes=("*.Attention",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=SamLikeAttention,
    describe=describe,
    matches=looks_like_it,
    about=About(
        models=(
            "SAM of Facebook and its copies: classes called `Attention` with two tables, "
            "`use_rel_pos` and `qkv`, which are tried out first; any map"
        ),
        exact="rows and columns of relative positions, made of the queries of each call",
        n="196 and 4096",
        tested="segment-anything 1.0, classes of the same interface",
    ),
)

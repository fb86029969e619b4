"""Attention in windows with a table of relative positions, as many repositories have it.

Copies of Swin's module go by the name `WindowAttention`: Microsoft's own, SwinIR's, HAT's, that of
3-D networks. A module counts as one if it has the parts, and if it computes what they suggest: its
forward is run once, with random numbers, beside attention that is written out.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite
from flashbias_convert.trial import require_result


class TableWindowAttention(PatchedAttention):
    """`WindowAttention`: (x, mask), or (x, index, mask) where the network keeps one index."""

    #: whether a call had another index than the usual one, see `is_usual`
    met_another_index: bool = False

    bypassed = ("attn_drop", "softmax")

    num_heads: int
    scale: float
    window_size: Any
    relative_position_bias_table: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.relative_position_bias_table, *index_buffer(self), window_of(self))

    def flashbias_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.original_class.forward).bind(self, x, *args, **kwargs)
        windows, n, _ = x.shape  # (B * nW, N, C)
        index = next((v for k, v in given.arguments.items() if k in INDEX_NAMES), None)
        if n != math.prod(window_of(self)) or (index is not None and not is_usual(self, index)):
            return self.original_forward(x, *args, **kwargs)
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        mask = given.arguments.get("mask")
        out = attend_windows(self.score_bias, q, k, v, mask, scale=self.scale)
        out = self.proj(out.transpose(1, 2).flatten(2))
        drop = self._modules.get("proj_drop")
        return out if drop is None else drop(out)


#: how forwards that are handed an index call it
INDEX_NAMES = ("rpi", "relative_position_index")
COMPILED_FOR_THE_USUAL = (
    "the index of relative positions is another one than this was compiled for; call it once "
    "before it is compiled"
)


def window_of(module: Any) -> tuple[int, ...]:
    """The window of a module as a tuple, of two or three sizes."""
    size = module.window_size
    return (size, size) if isinstance(size, int) else tuple(int(s) for s in size)


def usual_index(window: tuple[int, ...]) -> Tensor:
    """The place of each pair in the table, (N, N): offsets count from the last key to the first."""
    axes = [torch.arange(size) for size in window]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    total = torch.zeros(places.shape[1], places.shape[1], dtype=torch.long)
    for size, place in zip(window, places, strict=True):
        total = total * (2 * size - 1) + place[:, None] - place[None, :] + size - 1
    return total


def is_usual(module: Any, handed: Tensor, right: Callable[[], Tensor] | None = None) -> bool:
    """Whether an index that came with a call is the usual one; looks once for each tensor.

    A graph cannot wait for what a look finds: compiled code compares in each call, without waiting,
    and fails with another index, unless a call in eager mode had one before it was compiled.

    Args:
        module: the attention module, which remembers.
        handed: the index, of any shape.
        right: makes the usual one; default that of a window, see `usual_index`.
    """

    def wanted() -> Tensor:
        made = usual_index(window_of(module)) if right is None else right()
        return made.flatten().to(handed.device)

    if torch.compiler.is_compiling():
        usual = wanted()
        if module.met_another_index or handed.numel() != usual.numel():
            return False
        torch._assert_async((handed.flatten() == usual).all(), COMPILED_FOR_THE_USUAL)
        return True
    seen = (id(handed), handed.data_ptr(), -1 if handed.is_inference() else handed._version)
    if seen != module.__dict__.get("_usual_index"):
        if not torch.equal(handed.flatten(), wanted()):
            module.met_another_index = True
            return False
        module.__dict__["_usual_index"] = seen
    return True


def index_buffer(module: nn.Module) -> tuple[Tensor, ...]:
    """The module's own index, if it has one."""
    found = module._buffers.get("relative_position_index")
    return () if found is None else (found,)


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    table = getattr(module, "relative_position_bias_table", None)
    parts = [getattr(module, name, None) for name in ("qkv", "proj")]
    if not isinstance(table, nn.Parameter) or not all(isinstance(p, nn.Linear) for p in parts):
        return False
    if not all(hasattr(module, name) for name in ("num_heads", "scale", "window_size")):
        return False
    try:
        entries = math.prod(2 * size - 1 for size in window_of(module))
    except (TypeError, ValueError):
        return False
    qkv, heads = parts[0], module.num_heads
    right = qkv.out_features == 3 * qkv.in_features and qkv.in_features % heads == 0  # type: ignore[union-attr]
    return right and tuple(table.shape) == (entries, heads)


def describe(site: Site) -> Description:
    """The table by the usual index, after a trial whether the module computes that."""
    module: Any = site.module
    window = window_of(module)
    n, index = math.prod(window), usual_index(window)
    own = index_buffer(module)
    if own and not torch.equal(own[0].flatten().cpu(), index.flatten()):
        raise UnsupportedSite("its index of relative positions is not the usual one")
    _try_out(module, index)
    table = module.relative_position_bias_table
    masks, warnings = planned_mask(getattr(site.parent, "attn_mask", None))
    return Description(
        bias=table[index.to(table.device)].permute(2, 0, 1),
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.qkv.in_features // module.num_heads,
        index=index.to(table.device),
        exact_terms=masks,
        warnings=warnings,
    )


def _try_out(module: Any, index: Tensor) -> None:
    """Raise UnsupportedSite unless the forward is attention with that table and a mask."""
    twin: Any = copy.deepcopy(module).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    n = len(index)
    x = torch.randn(4, n, twin.qkv.in_features, generator=generator, dtype=torch.float64)
    mask = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    nn.init.normal_(twin.relative_position_bias_table, generator=generator)
    names = inspect.signature(type(twin).forward).parameters
    handed = {name: index for name in INDEX_NAMES if name in names}
    qkv = twin.qkv(x).unflatten(-1, (3, twin.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = twin.scale * qkv[0] @ qkv[1].mT + twin.relative_position_bias_table[index].movedim(
        2, 0
    )
    for hidden in (None, mask):
        added = 0.0 if hidden is None else hidden.repeat(2, 1, 1)[:, None]
        right = twin.proj(((scores + added).softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2))
        call = partial(twin, x, **handed, mask=hidden)
        require_result(call, right, "attention in windows")


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
        tested="classes of the same interface",
    ),
)

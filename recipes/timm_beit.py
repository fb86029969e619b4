"""BEiT and BEiT v2 of timm: a table of relative positions with entries for the class token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site
from flashbias_convert.tables import require_index
from flashbias_convert.terms import Dense


class BeitAttention(PatchedAttention):
    """timm's `Attention` of BEiT; the projections are the original's, line by line."""

    bypassed = ("attn_drop",)
    head_counts = ("num_heads",)
    head_values = ("q_bias", "k_bias", "v_bias")
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"qkv": 3})

    window_size: tuple[int, int] | None
    num_heads: int
    scale: float
    qkv_bias_separate: bool
    relative_position_bias_table: nn.Parameter | None
    qkv: nn.Linear
    q_bias: nn.Parameter | None
    k_bias: Tensor
    v_bias: nn.Parameter
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        window = self.window_size and tuple(self.window_size)
        return (self.relative_position_bias_table, window)

    def flashbias_forward(self, x: Tensor, shared_rel_pos_bias: Any = None) -> Tensor:
        batch, n, _ = x.shape
        if self.q_bias is None:
            qkv = self.qkv(x)
        else:
            qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            if self.qkv_bias_separate:
                qkv = self.qkv(x)
                qkv += qkv_bias
            else:
                qkv = F.linear(x, weight=self.qkv.weight, bias=qkv_bias)
        qkv = qkv.reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B, H, N, D)
        call: dict[str, Any] = {}
        if isinstance(shared_rel_pos_bias, Tensor):  # the owner did not run
            call["extra"] = (Dense(bias=shared_rel_pos_bias),)
        elif shared_rel_pos_bias is not None:
            call["built"] = {"cls_window_table": shared_rel_pos_bias}
        x = self.score_bias(q, k, v, scale=self.scale, **call)
        x = x.transpose(1, 2).flatten(2)  # not `channels`: heads may be split over processes
        return self.proj_drop(self.proj(x))


class Beit(PatchedOwner):
    """`Beit` with one bias for all blocks: it hands on the table instead of the matrix."""

    reads = ("rel_pos_bias",)

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def rel_pos_bias(self) -> Any:
        """What the model calls for its bias: while lean, inputs of a builder."""
        shared: Any = self._modules["rel_pos_bias"]
        if not self.is_lean:
            return shared
        table, window = shared.relative_position_bias_table, tuple(shared.window_size)
        # a tensor of this call, on which the blocks find what the first of them made
        return lambda: {"table": table.view_as(table), "window": window}


def describe(site: Site) -> Description:
    """A block's own bias by its own look-up; one that all blocks share comes with a call."""
    from timm.models.beit import gen_relative_position_index

    module: Any = site.module
    owner: Any = site.owner
    shared: Any = None if owner is None else owner.rel_pos_bias
    source: Any = module if module.relative_position_bias_table is not None else shared
    if source is None:
        raise NoBias("it has no relative positions")
    for each in {module, shared} - {None}:
        if each.relative_position_bias_table is not None:
            right = gen_relative_position_index(tuple(each.window_size))
            require_index(each.relative_position_index, right)
    n = source.window_size[0] * source.window_size[1] + 1
    return Description(
        bias=module._get_rel_pos_bias()[0] if source is module else None,
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.qkv.out_features // 3 // module.num_heads,
        index=source.relative_position_index,
        builders=() if shared is None else ("cls_window_table",),
    )


recipe = Recipe(
    name="timm_beit",
    title="BEiT, BEiT v2 (timm)",
    classes=("timm.models.beit.Attention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=BeitAttention,
    describe=describe,
    owners=(
        Owner(
            ("timm.models.beit.Beit",),
            Beit,
            when=lambda model: model.rel_pos_bias is not None,
            required=False,
        ),
    ),
    about=About(
        models="BEiT and BEiT v2, with a bias per block, shared by all blocks, or both",
        exact="a shared bias; with `--method exact` that of a block, too, with its class token",
        truncated="bias of a block",
        n="197 to 1025",
    ),
)

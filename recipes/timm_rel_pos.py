"""Models of timm with a module that makes the bias: CoAtNet, MaxViT, vit_relpos, vit_srelpos."""

from __future__ import annotations

import math
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site
from flashbias_convert.tables import (
    in_float32,
    require_own_buffers,
    require_plain_layers,
    rounding_warnings,
)
from flashbias_convert.terms import Dense

#: A vit_relpos at 224 pixels has 196 tokens, and heads of 64. Its attention is a small part of it,
#: and what that gains is lost where a card waits for the call: four layers took 5.54 ms compiled,
#: 5.51 as they were, of 256 images on an H200; 5.26 and 5.29 as CUDA graphs
#: (scripts/results/bench_families.csv). Other numbers of tokens up to `SHORT` and wider
#: heads were not measured: they are taken to be like it.
SHORT, WIDE = 256, 64
#: tokens and width of a head
MEASURED = (196, 64)


class RelPosAttention(PatchedAttention):
    """`Attention2d`, `AttentionCl` and `RelPosAttention`; the projections are the original's."""

    # the hidden layer of RelPosMlp has dropout of its own
    bypassed = ("rel_pos", "attn_drop")

    num_heads: int
    scale: float
    rel_pos: nn.Module | None
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        if self.rel_pos is None:
            return (self.num_heads,)  # the model makes a table anew in each call
        # buffers follow from the window
        return (*self.rel_pos.parameters(), tuple(self.rel_pos.window_size))  # type: ignore[arg-type]

    def flashbias_forward(self, x: Tensor, shared_rel_pos: Any = None) -> Tensor:
        q, k, v = self._project(x)  # views, (B, H, N, D)
        call: dict[str, Any] = {}
        if self.rel_pos is None and isinstance(shared_rel_pos, Tensor):  # the owner did not run
            call["extra"] = (Dense(bias=shared_rel_pos),)
        elif self.rel_pos is None:  # the original ignores a shared bias where it has its own
            call["built"] = shared_rel_pos
        out = (
            self.score_bias(q, k, v, scale=self.scale, **call).transpose(1, 2).flatten(2)
        )  # (B, N, C)
        if isinstance(self.qkv, nn.Conv2d):
            out = out.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
        else:
            out = out.reshape(*x.shape[:-1], -1)
        projected: Tensor = self.proj_drop(self.proj(out))
        return projected

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x)
        if isinstance(self.qkv, nn.Conv2d):
            qkv = qkv.flatten(2).transpose(1, 2)  # (B, N, 3 H D)
        else:
            qkv = qkv.reshape(x.shape[0], -1, qkv.shape[-1])
        if getattr(self, "head_first", False):
            heads = qkv.unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        else:
            heads = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[operator]
        return q, k, v


class RelPosOwner(PatchedOwner):
    """`VisionTransformerRelPos` with one bias for all blocks: hands on a table, not the matrix."""

    reads = ("shared_rel_pos",)

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def shared_rel_pos(self) -> Any:
        """What the model calls for its bias: while lean, inputs of a builder."""
        shared: Any = self._modules["shared_rel_pos"]
        if not self.is_lean:
            return shared
        name, window = builder_of(shared), tuple(shared.window_size)
        return SimpleNamespace(
            get_bias=lambda: {name: {"table": table_of(shared), "window": window}}
        )


def builder_of(shared: Any) -> str:
    """Which builder makes its term: there are entries for a class token, or none."""
    return "cls_window_table" if shared.prefix_tokens else "window_table"


def table_of(shared: Any) -> Tensor:
    """The numbers of each offset, (T, H), then those of the class token if there is one."""
    if hasattr(shared, "relative_position_bias_table"):
        table: Tensor = shared.relative_position_bias_table
        return table.view_as(table)  # a tensor of this call, on which blocks find what one made
    made = shared.bias_act(shared.mlp(shared.rel_coords_log).flatten(0, 1))
    made = made if shared.bias_gain is None else shared.bias_gain * made
    # an MLP gives the class token zeros
    return F.pad(made, (0, 0, 0, 3)) if shared.prefix_tokens else made


def describe(site: Site) -> Description:
    """The bias by the module's own `get_bias`, of whichever kind: a table, an MLP, TensorFlow's."""
    module: Any = site.module
    owner: Any = site.owner
    if module.rel_pos is None and owner is None:
        raise NoBias("it has no relative positions")
    source = owner.shared_rel_pos if module.rel_pos is None else module.rel_pos
    require_own_buffers(source)
    heads, size = module.num_heads, module.proj.weight.shape[1] // module.num_heads
    if source is not module.rel_pos:
        n = math.prod(source.window_size) + source.prefix_tokens
        builder, short = builder_of(source), not_worth(n, size)
        return Description(None, heads, n, n, size, builders=(builder,), not_worth=short)
    require_plain_layers(source, module)
    own, bias = source.get_bias(), in_float32(source).get_bias()
    n = bias.shape[-1]
    index = getattr(source, "relative_position_index", None)
    return Description(
        bias=bias.reshape(-1, n, n),
        num_heads=heads,
        n=n,
        m=n,
        head_dim=size,
        # that of an MLP has no entries for a class token
        index=index.view(n, n) if index is not None and index.numel() == n * n else None,
        warnings=rounding_warnings(own, bias),
        # windows and grids of MaxViT, which have no mask
        shared=hasattr(site.parent, "partition_size"),
        not_worth=not_worth(n, size),
    )


def not_worth(n: int, size: int) -> str:
    """Why few tokens with wide heads are left alone; nothing where it pays."""
    if n > SHORT or size < WIDE:
        return ""
    taken = (
        ""
        if (n, size) == MEASURED
        else f"; up to {SHORT} tokens and wider heads are taken to be like it"
    )
    return (
        f"{n} tokens and heads of {size}: four compiled layers of 196 tokens and heads of 64 were "
        "no faster in calls (5.54 ms of 256 images on an H200, 5.51 as they were; as CUDA graphs "
        f"5.26 and 5.29){taken}"
    )


recipe = Recipe(
    name="timm_rel_pos",
    title="CoAtNet, MaxViT, vit_relpos (timm)",
    classes=(
        "timm.models.maxxvit.Attention2d",
        "timm.models.maxxvit.AttentionCl",
        "timm.models.vision_transformer_relpos.RelPosAttention",
    ),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=RelPosAttention,
    describe=describe,
    owners=(
        Owner(
            ("timm.models.vision_transformer_relpos.VisionTransformerRelPos",),
            RelPosOwner,
            when=lambda model: model.shared_rel_pos is not None,
            required=False,
        ),
    ),
    about=About(
        models=(
            "CoAtNet, MaxViT, and vit_relpos and vit_srelpos from 257 tokens on: tables, MLPs, "
            "TensorFlow's tables, of a block or shared by all blocks"
        ),
        exact="a shared bias; with `--method exact` that of a block, too",
        truncated="bias of a block",
        n="49 to 576",
    ),
)

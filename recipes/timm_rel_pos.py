"""Models of timm with a module `rel_pos` that makes the bias: CoAtNet, MaxViT, vit_relpos."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import (
    in_float32,
    require_own_buffers,
    require_plain_layers,
    rounding_warnings,
)


class RelPosAttention(PatchedAttention):
    """`Attention2d`, `AttentionCl` and `RelPosAttention`; the projections are the original's."""

    # the hidden layer of RelPosMlp has dropout of its own
    bypassed = ("rel_pos", "attn_drop")

    num_heads: int
    scale: float
    rel_pos: nn.Module
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # buffers follow from the window
        return (*self.rel_pos.parameters(), tuple(self.rel_pos.window_size))  # type: ignore[arg-type]

    def flashbias_forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        # the original ignores a shared bias where it has its own
        q, k, v = self._project(x)  # views, (B, H, N, D)
        out = self.score_bias(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)  # (B, N, C)
        if isinstance(self.qkv, nn.Conv2d):
            out = out.transpose(1, 2).reshape(len(x), -1, *x.shape[2:])
        else:
            out = out.reshape(*x.shape[:-1], -1)
        projected: Tensor = self.proj_drop(self.proj(out))
        return projected

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x)
        if isinstance(self.qkv, nn.Conv2d):
            qkv = qkv.flatten(2).transpose(1, 2)  # (B, N, 3 H D)
        else:
            qkv = qkv.reshape(len(x), -1, qkv.shape[-1])
        if getattr(self, "head_first", False):
            heads = qkv.unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        else:
            heads = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[operator]
        return q, k, v


def describe(site: Site) -> Description:
    """The bias by the module's own `get_bias`, of whichever kind: a table, an MLP, TensorFlow's."""
    module: Any = site.module
    source = module.rel_pos
    if source is None and getattr(site.root, "shared_rel_pos", None) is not None:
        raise UnsupportedSite("the model makes one bias for all blocks and hands it on as a matrix")
    if source is None:
        raise NoBias("it has no relative positions")
    require_plain_layers(source, module)
    require_own_buffers(source)
    own, bias = source.get_bias(), in_float32(source).get_bias()
    n = bias.shape[-1]
    index = getattr(source, "relative_position_index", None)
    return Description(
        bias=bias.reshape(-1, n, n),
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.proj.weight.shape[1] // module.num_heads,
        # that of an MLP has no entries for a class token
        index=index.view(n, n) if index is not None and index.numel() == n * n else None,
        warnings=rounding_warnings(own, bias),
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
    tested=">=1.0.31,<1.1",
    attention=RelPosAttention,
    describe=describe,
    about=About(
        models=(
            "CoAtNet, MaxViT and vit_relpos: tables, MLPs, TensorFlow's tables; not one bias "
            "for all blocks"
        ),
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="49 to 576",
    ),
)

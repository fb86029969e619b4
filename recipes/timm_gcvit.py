"""GCViT of timm: attention in windows, every other block with queries of the whole image."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.tables import require_own_buffers


class GlobalWindowAttention(PatchedAttention):
    """timm's `WindowAttentionGlobal`; no window is shifted, so there is no mask."""

    bypassed = ("rel_pos", "attn_drop")

    #: see `queries_by_image`; asked when the class is made: compiled code finds the answer
    by_image: ClassVar[bool]

    num_heads: int
    head_dim: int
    scale: float
    use_global: bool
    rel_pos: nn.Module
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Dropout

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.by_image = queries_by_image()

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        source: Any = self.rel_pos
        return (source.relative_position_bias_table, tuple(source.window_size))

    def flashbias_forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        made = self.qkv(x).reshape(windows, n, -1, self.num_heads, self.head_dim)
        *q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)  # views, (B * nW, H, N, D)
        if self.use_global and q_global is not None:
            each, times = q_global.flatten(1, -2), windows // q_global.shape[0]  # (B, N, C)
            each = each.repeat_interleave(times, 0) if self.by_image else each.repeat(times, 1, 1)
            q = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)]
        out = self.score_bias(q[0], k, v, scale=self.scale).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(out))


@cache
def queries_by_image() -> bool:
    """Whether the windows of an image, which stand together, get the queries of that image.

    Older versions of timm hand the queries of the images out in turn, so that windows of a batch
    get those of another image. Tried out with two windows of each of two images.
    """
    from timm.models.gcvit import WindowAttentionGlobal

    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        attention = WindowAttentionGlobal(1, 1, (1, 2)).float().eval()
        for parameter in attention.parameters():
            parameter.fill_(1.0)
        tokens = torch.tensor([[0.0], [1.0]], dtype=torch.float32)
        out = attention(tokens.expand(4, 2, 1), tokens.repeat(1, 2).view(2, 1, 2, 1))
    return torch.equal(out[0], out[1])


def describe(site: Site) -> Description:
    """The bias by the module's own look-up."""
    module: Any = site.module
    source = module.rel_pos
    require_own_buffers(source)
    n = source.window_area
    return Description(
        bias=source.get_bias()[0],
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.head_dim,
        index=source.relative_position_index.view(n, n),
        shared=True,  # no window has a mask
    )


recipe = Recipe(
    name="timm_gcvit",
    title="GCViT (timm)",
    classes=("timm.models.gcvit.WindowAttentionGlobal",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=GlobalWindowAttention,
    describe=describe,
    about=About(
        models="GCViT: blocks with queries of their own, and with those of the image",
        exact="with `--method exact` the position bias",
        truncated="position bias",
        n="window: 49, 196",
    ),
)

"""Swin Transformer V2's window attention outside of timm: Microsoft's own class, and copies of it.

As `window_attention`, a module counts as one if it has the parts, and if its forward, run once with
random numbers, computes what they suggest.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import (
    continuous_bias,
    cosine_scale,
    require_coordinates,
    require_index,
    require_plain_layers,
)
from flashbias_convert.trial import require_result

from .timm_swinv2 import SwinV2WindowAttention
from .window_attention import usual_index, window_of


class CosineWindowAttention(SwinV2WindowAttention):
    """`WindowAttention` with `cpb_mlp`: (x, mask). Keys have no bias, and no parameter for one."""

    head_values: ClassVar[tuple[str, ...]] = ("logit_scale", "q_bias", "v_bias")

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, _ = x.shape  # (B * nW, N, C)
        qkv = F.linear(x, self.qkv.weight, qkv_bias(self))
        qkv = qkv.reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        scale = self.sealed("scale", self.logit_scale, cosine_scale)
        out = attend_windows(self.score_bias, q, k, v, mask, scale=scale, cosine=True)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def qkv_bias(module: Any) -> Tensor | None:
    """The bias of queries, keys and values in one, shape (3 C); that of keys is zero."""
    if module.q_bias is None:
        return None
    return torch.cat((module.q_bias, torch.zeros_like(module.v_bias), module.v_bias))


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts, in sizes that go together."""
    tensors = ("logit_scale", "relative_coords_table", "relative_position_index")
    if not all(isinstance(getattr(module, name, None), Tensor) for name in tensors):
        return False
    parts = [getattr(module, name, None) for name in ("cpb_mlp", "qkv", "proj", "proj_drop")]
    names = ("num_heads", "window_size", "pretrained_window_size", "q_bias", "v_bias")
    if not all(isinstance(part, nn.Module) for part in parts):
        return False
    if not all(hasattr(module, name) for name in names):
        return False
    return int(module.logit_scale.numel()) == module.num_heads and len(module.window_size) == 2


def usual_coordinates(module: Any) -> Tensor:
    """Of each offset, shape (1, 2 Wh - 1, 2 Ww - 1, 2): logarithms of shares of the window."""
    window = window_of(module)
    axes = [torch.arange(1.0 - size, size) for size in window]
    spans = module.pretrained_window_size if module.pretrained_window_size[0] > 0 else window
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    shares = places * 8 / (torch.tensor([float(span) for span in spans]) - 1)
    return (shares.sign() * (shares.abs() + 1).log2() / math.log2(8)).unsqueeze(0)


def describe(site: Site) -> Description:
    """The position bias from the module's own layers, after a trial whether it computes that.

    Raises:
        UnsupportedSite: it computes something else, or its buffers are not those of its window.
    """
    module: Any = site.module
    require_plain_layers(module.cpb_mlp, module.cpb_mlp)  # torch's own, not those of its library
    index = usual_index(window_of(module))
    require_index(module.relative_position_index, index)
    require_coordinates(module.relative_coords_table, usual_coordinates(module))
    if not isinstance(module.qkv, nn.Linear) or module.qkv.bias is not None:
        raise UnsupportedSite("its `qkv` is no linear layer without a bias of its own")
    _try_out(module, index)
    index = module.relative_position_index
    bias, warnings = continuous_bias(
        module.cpb_mlp, module.relative_coords_table, index, module.num_heads
    )
    masks, mask_warnings = planned_mask(getattr(site.parent, "attn_mask", None))
    n = math.prod(window_of(module))
    return Description(
        bias=bias,
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.qkv.in_features // module.num_heads,
        index=index,
        exact_terms=masks,
        warnings=warnings + mask_warnings,
    )


@torch.no_grad()
def _try_out(module: Any, index: Tensor) -> None:
    """Raise UnsupportedSite unless the forward is cosine attention with that bias and a mask."""
    twin: Any = copy.deepcopy(module).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        std = (parameter[0].numel()) ** -0.5 if parameter.dim() == 2 else 1.0
        nn.init.normal_(parameter, std=std, generator=generator)
    twin.logit_scale.add_(3.0)  # on both sides of the clamp
    n = len(index)
    x = torch.randn(4, n, twin.qkv.in_features, generator=generator, dtype=torch.float64)
    mask = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    qkv = F.linear(x, twin.qkv.weight, qkv_bias(twin))
    q, k, v = qkv.unflatten(-1, (3, twin.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scale = cosine_scale(twin.logit_scale)[:, None, None]
    bias, _ = continuous_bias(twin.cpb_mlp, twin.relative_coords_table, index, twin.num_heads)
    scores = scale * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) + bias
    for hidden in (None, mask):
        added = 0.0 if hidden is None else hidden.repeat(2, 1, 1)[:, None]
        right = twin.proj(((scores + added).softmax(-1) @ v).transpose(1, 2).flatten(2))
        require_result(partial(twin, x, mask=hidden), right, "cosine attention in windows")


recipe = Recipe(
    name="cosine_window_attention",
    title="Swin Transformer V2's window attention of any repository",
    classes=("*.WindowAttention:cosine",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=CosineWindowAttention,
    describe=describe,
    matches=looks_like_it,
    about=About(
        models=(
            "Swin Transformer V2 in Microsoft's own code and copies of it: classes of this name "
            "with `cpb_mlp` and `logit_scale`, which are tried out first"
        ),
        exact=(
            "shift mask, cosine attention, logit scales; with `--method exact` the position "
            "bias, too"
        ),
        truncated="position bias",
        n="window: 64 to 576",
        tested="Microsoft's code, a class of the same interface",
    ),
)

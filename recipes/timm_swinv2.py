"""Swin Transformer V2 of timm: cosine attention in windows, with a continuous position bias."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.masks import attend_windows, planned_mask
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site, UnsupportedSite


class SwinV2WindowAttention(PatchedAttention):
    """timm's `WindowAttention`; the projections are the original's, line by line."""

    bypassed = ("cpb_mlp", "attn_drop", "softmax")

    window_size: tuple[int, int]
    pretrained_window_size: tuple[int, int]
    num_heads: int
    qkv_bias_separate: bool
    qkv: nn.Linear
    q_bias: nn.Parameter | None
    k_bias: Tensor
    v_bias: nn.Parameter
    logit_scale: nn.Parameter
    cpb_mlp: nn.Sequential
    proj: nn.Linear
    proj_drop: nn.Dropout

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # the coordinates and the index follow from the two window sizes
        sizes = (tuple(self.window_size), tuple(self.pretrained_window_size))
        return (*self.cpb_mlp.parameters(), self.logit_scale, *sizes)

    def scale_bound(self) -> float | None:
        scale = self._scale().detach()
        return None if scale.is_meta else float(scale.max())

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        # called for every new input size: with the same window, too, the shift mask may change
        super().set_window_size(window_size)  # type: ignore[misc]
        self.score_bias.mask_memo.doubtful = True

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, channels = x.shape  # (B * nW, N, C)
        if self.q_bias is None:
            qkv = self.qkv(x)
        else:
            qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            if self.qkv_bias_separate:
                qkv = self.qkv(x)
                qkv += qkv_bias
            else:
                qkv = F.linear(x, weight=self.qkv.weight, bias=qkv_bias)
        qkv = qkv.reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # views, (B * nW, H, N, D)
        x = attend_windows(self.score_bias, q, k, v, mask, scale=self._scale(), cosine=True)
        x = x.transpose(1, 2).reshape(windows, n, channels)
        return self.proj_drop(self.proj(x))

    def _scale(self) -> Tensor:
        """Per head, (H,), in float32 or wider."""
        wide = self.logit_scale.to(torch.promote_types(self.logit_scale.dtype, torch.float32))
        return wide.clamp(max=math.log(1.0 / 0.01)).exp().reshape(-1)


def describe(site: Site) -> Description:
    """The position bias from the module's own layers, and the shift mask that its block keeps."""
    module: Any = site.module
    _check_buffers(module)
    bias, warnings = _position_bias(module)
    # a block whose map may change size (`dynamic_mask`) keeps no mask: it makes one for each call
    masks, mask_warnings = planned_mask(getattr(site.parent, "attn_mask", None))
    n = math.prod(module.window_size)
    return Description(
        bias=bias,
        num_heads=module.num_heads,
        n=n,
        m=n,
        head_dim=module.dim // module.num_heads,
        index=module.relative_position_index,
        exact_terms=masks,
        warnings=warnings + mask_warnings,
    )


def _check_buffers(module: Any) -> None:
    # checkpoints do not hold these buffers: after a build on the meta device they are garbage
    table, index = module.relative_coords_table, module.relative_position_index
    right_table, right_index = module._make_pair_wise_relative_positions(
        device=index.device, dtype=torch.float32
    )
    same = (
        torch.equal(index, right_index)
        and table.shape == right_table.shape
        and torch.allclose(table.float(), right_table, rtol=2**-7)  # it may have been bfloat16
    )
    if not same:
        raise UnsupportedSite(
            "its relative position buffers do not belong to its window, as after a build on the "
            "meta device; call init_non_persistent_buffers() of every module that has it"
        )


def _position_bias(module: Any) -> tuple[Tensor, tuple[str, ...]]:
    """The bias (H, N, N) in float32 or wider, and what differs from the original's own."""
    own = _run_mlp(module, module.cpb_mlp, module.relative_coords_table)
    if torch.finfo(own.dtype).bits >= 32:
        return own, ()
    wide = copy.deepcopy(module.cpb_mlp).float()
    bias = _run_mlp(module, wide, module.relative_coords_table.float())
    off = (bias - own.float()).abs().max()
    return bias, (
        f"the original computes its bias in {str(own.dtype).removeprefix('torch.')} and is off "
        f"by up to {off:.2g}; the terms are made in float32 from the same weights",
    )


def _run_mlp(module: Any, mlp: nn.Module, coordinates: Tensor) -> Tensor:
    table = mlp(coordinates).view(-1, module.num_heads)
    n = math.prod(module.window_size)
    bias = table[module.relative_position_index.view(-1)].view(n, n, -1).permute(2, 0, 1)
    return 16 * torch.sigmoid(bias.contiguous())


recipe = Recipe(
    name="timm_swinv2",
    title="Swin Transformer V2 (timm)",
    classes=("timm.models.swin_transformer_v2.WindowAttention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    attention=SwinV2WindowAttention,
    describe=describe,
)

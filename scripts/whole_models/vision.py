"""SwinV2 of timm at 384 pixels, windows of 24 x 24; written by hand as an expert would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn

from .case import (
    EXACT,
    FLEX,
    NO_BIAS,
    NONE_CUDNN,
    ORIGINAL,
    OURS,
    ROOT,
    SDPA,
    SDPA_CUDNN,
    Case,
    converted,
    drawn,
)
from .hand import HandAttention, replace_children

#: where learned biases come from
EXAMPLE = ROOT / "examples/swinv2_cifar10/model.safetensors"
_WAYS = (ORIGINAL, SDPA, SDPA_CUDNN, FLEX, NO_BIAS, NONE_CUDNN, OURS, EXACT)


class HandWindowAttention(nn.Module):
    """timm's `WindowAttention` with everything that never changes made beforehand.

    Args:
        attention: the original.
        mask: of its block, (nW, N, N), or None.
        way: see `HandAttention`.
    """

    def __init__(self, attention: Any, mask: Tensor | None, way: str) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.qkv, self.proj = attention.qkv, attention.proj
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        self.register_buffer("qkv_bias", bias, persistent=False)
        logit_scale = attention.logit_scale.clamp(max=math.log(1 / 0.01)).exp()
        self.register_buffer("logit_scale", logit_scale, persistent=False)
        added = position_bias(attention)[None]
        self.attend = HandAttention(way, added if mask is None else added + mask[:, None], 1.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, channels = x.shape
        qkv = F.linear(x, self.qkv.weight, self.qkv_bias)
        q, k, v = qkv.reshape(windows, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.normalize(q, dim=-1) * self.logit_scale, F.normalize(k, dim=-1)
        out = self.attend(q, k, v).transpose(1, 2).reshape(windows, n, channels)
        return self.proj(out)


def position_bias(attention: Any) -> Tensor:
    """The continuous position bias, (H, N, N), as `WindowAttention.forward` computes it."""
    table = attention.cpb_mlp(attention.relative_coords_table).view(-1, attention.num_heads)
    index = attention.relative_position_index
    return 16 * table[index.flatten()].view(*index.shape, -1).permute(2, 0, 1).sigmoid()


def by_hand(model: nn.Module, way: str) -> nn.Module:
    """Replace every window attention."""

    def make(attention: Any, block: Any) -> nn.Module:
        return HandWindowAttention(attention, block.attn_mask, way)

    return replace_children(model, WindowAttention, make)


@torch.no_grad()
def learned(model: nn.Module, example: Path = EXAMPLE) -> nn.Module:
    """Position biases and scales that a small model has learned, drawn at random; norms of one.

    At initialisation a SwinV2 has next to no bias, and blocks that add nothing.
    """
    state = load_file(example)
    donors = [key.removesuffix("logit_scale") for key in state if key.endswith("logit_scale")]
    for module in model.modules():
        if isinstance(module, WindowAttention):
            donor = donors[int(torch.randint(len(donors), ()))]
            heads = torch.randint(len(state[f"{donor}logit_scale"]), (module.num_heads,))
            first, last = module.cpb_mlp[0], module.cpb_mlp[-1]
            first.weight.copy_(state[f"{donor}cpb_mlp.0.weight"])
            first.bias.copy_(state[f"{donor}cpb_mlp.0.bias"])
            last.weight.copy_(state[f"{donor}cpb_mlp.2.weight"][heads])
            module.logit_scale.copy_(state[f"{donor}logit_scale"][heads])
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight")):
            parameter.fill_(1)
    return model


def swinv2(name: str, batch: int, size: int, window: int, **build: Any) -> Case:
    """A SwinV2 of timm, weights random but for its position biases."""
    architecture = build.pop("architecture", name)

    def make(device: torch.device) -> nn.Module:
        # stochastic depth does nothing here, but has every block compiled anew
        return learned(timm.create_model(architecture, drop_path_rate=0.0, **build)).to(device)

    def inputs(_: Any, __: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        return (drawn((3, size, size), count).to(device, dtype),), {}

    def alter(model: nn.Module, way: str) -> nn.Module:
        return converted(model, way) if way in (OURS, EXACT) else by_hand(model, way)

    return Case(name, batch, window**2, _WAYS, make, inputs, alter)


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the names of the command line."""
    if tiny:
        args = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1]}
        args |= {"num_heads": [1, 2], "window_size": 8, "num_classes": 5}
        name = "swinv2_tiny_window8_256"
        return {"swinv2-b": swinv2("swinv2-tiny", 2, 32, 8, architecture=name, **args)}
    base, large = (f"swinv2_{size}_window12to24_192to384" for size in ("base", "large"))
    return {
        "swinv2-b": swinv2("SwinV2-B 384", 64, 384, 24, architecture=base),
        "swinv2-l": swinv2("SwinV2-L 384", 64, 384, 24, architecture=large),
    }

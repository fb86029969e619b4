"""SwinUNETR of MONAI: windows of a volume, which are smaller where the map is smaller.

Of a smaller window with N tokens the class uses the first N rows and columns of the index of the
full one, whatever the offsets of its tokens are. So it is here.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.compiler_faults import warn_of_padded_strides
from flashbias_convert.recipe import Recipe
from flashbias_convert.relative_positions import window_of
from flashbias_convert.terms import TERM_KINDS, Dense

from .window_attention import TableWindowAttention, describe


class MonaiWindowAttention(TableWindowAttention):
    """MONAI's `WindowAttention`: (x, mask)."""

    relative_position_index: Tensor

    def flashbias_forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        warn_of_padded_strides("SwinUNETR", x.device)
        n = x.shape[1]
        if n >= math.prod(window_of(self)):
            return super().flashbias_forward(x, mask)
        bias = self.relative_position_bias_table[self.relative_position_index[:n, :n]]
        bias = bias.permute(2, 0, 1)  # (H, N, N)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B * nW, N, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if mask is not None:
            bias = bias + mask[:, None]  # (nW, H, N, N)
            q, k, v = (part.unflatten(0, (-1, mask.shape[0])) for part in (q, k, v))
        only = {"extra": (Dense(bias=bias),), "without": tuple(TERM_KINDS)}
        out = self.score_bias(q, k, v, scale=self.scale, **only)
        out = out.reshape(x.shape[0], self.num_heads, n, -1).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(out))  # type: ignore[operator]


recipe = Recipe(
    name="monai_swin_unetr",
    title="SwinUNETR (MONAI)",
    classes=("monai.networks.nets.swin_unetr.WindowAttention",),
    library="monai",
    tested=">=1.6,<1.7",
    attention=MonaiWindowAttention,
    describe=describe,
    about=About(
        models="SwinUNETR of MONAI, any input size",
        exact="shift mask, as a dense term; smaller windows; with `--method exact` the position "
        "bias, too",
        truncated="position bias",
        n="window: 343",
    ),
)

"""Attention of repositories that no package offers: classes of the same interface and formulas.

The recipes know such classes by their parts, and try them out. Each is written as it is published,
as far as its attention goes, in a chain of blocks of the usual kind.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashbias_convert.relative_positions import window_index


class WindowAttention(nn.Module):
    """That of Microsoft's Swin: windows (B * nW, N, C), mask (nW, N, N) or None."""

    def __init__(self, dim: int, window_size: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.window_size, self.num_heads = window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        index = window_index(window_size)
        table = torch.zeros(int(index.max()) + 1, num_heads)
        self.relative_position_bias_table = nn.Parameter(table)
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, dim = x.shape
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        index: Any = self.relative_position_index
        bias = self.relative_position_bias_table[index.view(-1)].view(n, n, -1)
        scores = q @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous()[None]
        if mask is not None:
            shape = (windows // len(mask), len(mask), self.num_heads, n, n)
            scores = (scores.view(shape) + mask[None, :, None]).view(-1, self.num_heads, n, n)
        out = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(windows, n, dim)))


class CosineWindowAttention(nn.Module):
    """That of Microsoft's Swin V2, under its name: windows (B * nW, N, C), mask (nW, N, N)."""

    factor = 16.0

    def __init__(
        self,
        dim: int,
        window: tuple[int, int],
        heads: int,
        trained: tuple[int, int] = (0, 0),
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.window_size, self.pretrained_window_size, self.num_heads = window, trained, heads
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(inplace=True), nn.Linear(32, heads, bias=False)
        )
        spans = trained if trained[0] > 0 else window
        rows, columns = (
            8.0 * torch.arange(1 - size, size) / (span - 1)
            for size, span in zip(window, spans, strict=True)
        )
        table = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)[None]
        table = table.sign() * torch.log2(table.abs() + 1.0) / math.log2(8)
        self.register_buffer("relative_coords_table", table)
        self.register_buffer("relative_position_index", window_index(window))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.proj, self.softmax = nn.Linear(dim, dim), nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, dim = x.shape
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.logit_scale.clamp(max=math.log(100.0)).exp()
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        added = table[self.relative_position_index.view(-1)].view(n, n, -1).permute(2, 0, 1)  # type: ignore[operator]
        scores = scores + self.factor * added.sigmoid()
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(windows, n, dim)))


CosineWindowAttention.__name__ = CosineWindowAttention.__qualname__ = "WindowAttention"


class Attention(nn.Module):
    """That of segment-anything's image encoder: maps (B, H, W, C)."""

    def __init__(self, dim: int, num_heads: int, size: int) -> None:
        super().__init__()
        self.num_heads, self.use_rel_pos = num_heads, True
        self.scale = (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * size - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * size - 1, dim // num_heads))

    @staticmethod
    def rows(n: int, table: Tensor) -> Tensor:
        """What belongs to each pair of n rows, (n, n, D)."""
        if len(table) != 2 * n - 1:
            table = F.interpolate(table.T[None], size=2 * n - 1, mode="linear")[0].T
        place = torch.arange(n, device=table.device)
        return table[place[:, None] - place[None, :] + n - 1]

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, -1)
        flat = (batch * self.num_heads, height * width, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, *flat).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        grid = q.reshape(len(q), height, width, -1)
        down = torch.einsum("bhwc,hkc->bhwk", grid, self.rows(height, self.rel_pos_h))
        across = torch.einsum("bhwc,wkc->bhwk", grid, self.rows(width, self.rel_pos_w))
        scores = scores.view(-1, height, width, height, width)
        scores = scores + down[..., None] + across[..., None, :]
        out = scores.view(len(q), height * width, -1).softmax(-1) @ v
        out = out.view(batch, self.num_heads, height, width, -1).permute(0, 2, 3, 1, 4)
        return self.proj(out.reshape(batch, height, width, -1))


class ALiBiMultiHeadAttention(nn.Module):
    """The causal one of github.com/jaketae/alibi; scores are divided by the root of the width."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.causal, self.num_heads, self.scale = True, heads, math.sqrt(width)
        slopes = 256.0 ** (-torch.arange(1, heads + 1) / heads)
        # that every dtype holds: rounding them is another model
        self.register_buffer("m", slopes.bfloat16().float()[:, None, None])
        self.kqv, self.dropout = nn.Linear(width, 3 * width, bias=False), nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(1, 1, longest, longest).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        parts = self.kqv(x).chunk(3, -1)
        k, q, v = (p.view(batch, n, self.num_heads, -1).transpose(1, 2) for p in parts)
        place = torch.arange(n, device=x.device)
        bias = (self.m * (place[None, :] - place[:, None]))[None]
        scores = q @ k.transpose(-2, -1) / self.scale + bias
        hidden = self.mask[..., :n, :n] == 0  # type: ignore[index]
        out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.dropout(out.transpose(1, 2).reshape(batch, n, width))


ALiBiMultiHeadAttention.__module__ = "alibi.attention"  # where that repository has it


class OCAB(nn.Module):
    """HAT's overlapping block: windows of queries, larger ones of keys; (B, H * W, C)."""

    def __init__(self, dim: int, side: int, num_heads: int) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, side, num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.overlap_win_size = side + side // 2
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        padding = (self.overlap_win_size - side) // 2
        self.unfold = nn.Unfold(self.overlap_win_size, stride=side, padding=padding)
        entries = (side + self.overlap_win_size - 1) ** 2
        self.relative_position_bias_table = nn.Parameter(torch.zeros(entries, num_heads))
        self.softmax = nn.Softmax(dim=-1)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, x_size: tuple[int, int], rpi: Tensor) -> Tensor:
        shortcut, (h, w), side, heads = x, x_size, self.window_size, self.num_heads
        b, m = len(x), self.overlap_win_size**2
        q, k, v = self.qkv(self.norm1(x).view(b, h, w, -1)).split(self.dim, -1)
        q = q.view(b, h // side, side, w // side, side, self.dim).transpose(2, 3)
        q = q.reshape(-1, side * side, heads, self.dim // heads).transpose(1, 2)
        windows = self.unfold(torch.cat([k, v], -1).permute(0, 3, 1, 2))  # (b, 2 dim m, nW)
        windows = windows.view(b, 2, heads, self.dim // heads, m, -1).permute(1, 0, 5, 2, 4, 3)
        k, v = windows.reshape(2, -1, heads, m, self.dim // heads)
        bias = self.relative_position_bias_table[rpi.view(-1)].view(side**2, m, -1)
        scores = q * self.scale @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous()[None]
        out = (self.softmax(scores) @ v).transpose(1, 2)
        out = out.reshape(b, h // side, w // side, side, side, self.dim).transpose(2, 3)
        x = self.proj(out.reshape(b, h * w, self.dim)) + shortcut
        return x + self.mlp(self.norm2(x))


def overlap_index(side: int, larger: int) -> Tensor:
    """HAT's index (side ** 2, larger ** 2): key minus query, moved by side - larger + 1."""
    own, keys = (torch.cartesian_prod(torch.arange(s), torch.arange(s)) for s in (side, larger))
    apart = keys[None] - own[:, None] + side - larger + 1
    return apart[..., 0] * (side + larger - 1) + apart[..., 1]

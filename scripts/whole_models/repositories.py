"""Models around classes of `copies` and its neighbours: chains of blocks of published sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import copied_audio
from .case import drawn
from .copied_texts import BertEncoder, JinaBertEncoder, feed_forward
from .copies import (
    OCAB,
    ALiBiMultiHeadAttention,
    Attention,
    CosineWindowAttention,
    WindowAttention,
    overlap_index,
)
from .given import Inputs, normal
from .parts import Parts, Sizes


class Blocks(nn.Module):
    """Norm, attention and a feed-forward layer, one after the other.

    Args:
        width: of tokens.
        attentions: the modules that attend.
        masks: what each of them is handed, or None.
    """

    def __init__(
        self, width: int, attentions: list[nn.Module], masks: list[Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.attention = nn.ModuleList(attentions)
        self.norm = nn.ModuleList([nn.LayerNorm(width) for _ in attentions])
        self.mlp = nn.ModuleList([feed_forward(width) for _ in attentions])
        for i, mask in enumerate(masks or []):
            self.register_buffer(f"mask_{i}", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        if hasattr(self, "mask_0"):
            x = x.flatten(0, 1)  # windows of all images
        for i, (attend, norm, mlp) in enumerate(
            zip(self.attention, self.norm, self.mlp, strict=True)
        ):
            given = (getattr(self, f"mask_{i}"),) if hasattr(self, f"mask_{i}") else ()
            x = x + attend(norm(x), *given)
            x = x + mlp(x)
        return x.view(shape)


class Overlapping(nn.Module):
    """HAT's overlapping blocks with the index that its network keeps."""

    def __init__(self, blocks: int, dim: int, side: int, heads: int, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OCAB(dim, side, heads) for _ in range(blocks)])
        self.size = (size, size)
        self.register_buffer("index", overlap_index(side, side + side // 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.size, self.index)
        return x


def parts(s: Sizes) -> Parts:
    """By the names of their rows."""
    layers, n, shifts = s.layers, s.text, max(2, s.layers)
    side, heads, width, across = (4, 2, 16, 2) if s.tiny else (12, 4, 128, 8)
    wide, fewer = (4, 2) if s.tiny else (24, 4)
    grid = 4 if s.tiny else 32
    hat = (layers, 12, 4, 2, 8) if s.tiny else (layers, 180, 16, 6, 64)
    audio, spoken = max(1, s.batch // 2), 12 if s.tiny else 500
    patches = 16 if s.tiny else 496  # 62 x 8, of 16 frames by 16 bands

    def chain(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: Blocks(s.dim, [make() for _ in range(layers)])

    return {
        f"window_attention, as Swin base 384, {shifts} blocks in windows": (
            s.batch, side**2, lambda: _windows(WindowAttention, shifts, side, heads, width, across),
            normal((across**2, side**2, width)),
        ),
        f"cosine_window_attention, as Swin V2 base 384, {shifts} blocks in windows": (
            s.batch, wide**2,
            lambda: _windows(CosineWindowAttention, shifts, wide, heads, width, fewer),
            normal((fewer**2, wide**2, width)),
        ),
        f"sam_attention, base 512, {layers} blocks of whole maps": (
            s.few, grid**2, chain(lambda: Attention(s.dim, s.heads, grid)),
            normal((grid, grid, s.dim)),
        ),
        f"jaketae_alibi, base, {layers} blocks": (
            s.few, n, chain(lambda: ALiBiMultiHeadAttention(s.dim, s.heads, n)),
            normal((n, s.dim)),
        ),
        f"jina_bert, encoder of base, {layers} layers": (
            s.few, n, lambda: JinaBertEncoder(layers, s.dim, s.heads, n), _text(n, s.dim, True),
        ),
        f"mosaic_bert, encoder of base, {layers} layers": (
            s.few, n, lambda: BertEncoder(layers, s.dim, s.heads, n), _text(n, s.dim, False),
        ),
        f"gated_audio, BEATs base, 10 s, {layers} layers": (
            audio, patches, lambda: copied_audio.beats(layers, s.dim, s.heads),
            normal((patches, s.dim)),
        ),
        f"gated_wavlm, base, 10 s, {layers} layers": (
            audio, spoken, lambda: copied_audio.wavlm(layers, s.dim, s.heads),
            normal((spoken, s.dim)),
        ),
        f"hat_overlap, 64 x 64, {layers} blocks": (
            s.few, hat[2] ** 2, lambda: Overlapping(*hat), normal((hat[4] ** 2, hat[1])),
        ),
    }  # fmt: skip


def _windows(
    kind: Callable[..., nn.Module], layers: int, side: int, heads: int, width: int, across: int
) -> nn.Module:
    """Every second block has a shift mask, as in Swin."""
    made = [kind(width, (side, side), heads) for _ in range(layers)]
    mask = shift_mask(side, across)
    return Blocks(width, made, [mask if i % 2 else None for i in range(layers)])


def shift_mask(side: int, across: int) -> Tensor:
    """What a shift by half a window hides, (across ** 2, N, N): 0 and -100."""
    size, shift = side * across, side // 2
    place = torch.arange(size)
    region = (place >= size - side).long() + (place >= size - shift).long()
    regions = region[:, None] * 3 + region[None, :]
    windows = regions.view(across, side, across, side).transpose(1, 2).reshape(across**2, -1)
    return (windows[:, :, None] != windows[:, None, :]).float() * -100.0


def _text(n: int, width: int, additive: bool) -> Inputs:
    """States and a mask that hides nothing: zeros that are added, or ones."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        states = drawn((n, width), count).to(device, dtype)
        if additive:
            return (states, states.new_zeros(count, 1, 1, n)), {}
        return (states, torch.ones(count, n, dtype=torch.long, device=device)), {}

    return make

"""The plain Transformer of the paper, with a static bias.

Eight layers of 512 channels, 8 heads, 1,024 channels between; batch 1. One static bias serves all
layers, which is kind to whoever stores it as a matrix. It is a product of factors of rank 8, or
ALiBi, so that everybody computes the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .case import (
    EXACT,
    FLEX,
    NO_BIAS,
    NONE_CUDNN,
    ORIGINAL,
    SDPA,
    SDPA_CUDNN,
    Case,
    drawn,
)
from .static_bias import StaticBias, attention

WAYS = (ORIGINAL, SDPA, SDPA_CUDNN, FLEX, NO_BIAS, NONE_CUDNN, EXACT)


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, attend: nn.Module) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PlainTransformer(nn.Module):
    """Layers that share a static bias."""

    attend: nn.Module

    def __init__(self, layers: int, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.attend)
        return x


def _unchanged(model: nn.Module, way: str) -> nn.Module:
    return model


def plain(n: int, layers: int = 8, dim: int = 512, heads: int = 8, hidden: int = 1024) -> Case:
    """The plain Transformer at a length."""

    def make(device: torch.device) -> nn.Module:
        return PlainTransformer(layers, dim, heads, hidden).to(device)

    def inputs(model: Any, way: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        # here and not before: a matrix is made in the dtype in which it is kept
        bias = StaticBias.factors(heads, n, 8, device)
        model.attend = attention(way, bias, dtype, dim // heads)
        return (drawn((n, dim), count).to(device, dtype),), {}

    return Case(f"plain Transformer {n}", 1, n, WAYS, make, inputs, _unchanged)


def lengths(tiny: bool, first: int = 1024, last: int = 65536) -> Iterator[int]:
    """By powers of two."""
    n = first
    while n <= last:
        yield 2 * (n // first) + 14 if tiny else n
        n *= 4 if tiny else 2


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the names of the command line."""
    if tiny:
        return {f"plain-{n}": plain(n, 2, 16, 2, 32) for n in (20, 33)}
    return {f"plain-{n}": plain(n) for n in lengths(False)}

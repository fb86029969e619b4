"""Shapes of real attention calls with a bias, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import Alibi, Dense, LowRank, Regions, RelativeTable, ScoreBias


@dataclass(frozen=True)
class Shape:
    """One attention call.

    Attributes:
        batch, heads, n, d: sizes of q, k and v (*batch, heads, n, d).
        bias: makes the terms on a device; None for attention without a bias.
        options: keyword arguments of `flashbias_attention`.
    """

    batch: tuple[int, ...]
    heads: int
    n: int
    d: int
    bias: Callable[[Shape, torch.device], ScoreBias] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as an attention module has them: views of one packed projection."""
        packed = torch.randn(*self.batch, self.n, 3, self.heads, self.d, device=device).to(dtype)
        q, k, v = packed.movedim(-3, 0).transpose(-2, -3).unbind(0)
        return q, k, v


def low_rank(rank: int) -> Callable[[Shape, torch.device], ScoreBias]:
    """Random factors, as an SVD leaves them: one rounding, no split columns."""

    def make(shape: Shape, device: torch.device) -> ScoreBias:
        size = (shape.heads, shape.n, rank)
        term = LowRank(
            phi_q=torch.randn(size, device=device),
            phi_k=torch.randn(size, device=device) / rank,
            split=0,
        )
        return ScoreBias((term,), shape.heads)

    return make


def window_codes(n: int) -> tuple[Tensor, Tensor, int]:
    """Query codes, key codes and table size of a square window of n tokens."""
    side = round(n**0.5)
    token = torch.arange(n)
    u = token // side * (2 * side - 1) + token % side
    return u, int(u.max()) - u, (2 * side - 1) ** 2


def table(shape: Shape, device: torch.device) -> ScoreBias:
    """A relative table of a square window."""
    u, v, size = window_codes(shape.n)
    values = torch.randn(shape.heads, size, device=device)
    term = RelativeTable(table=values, u=u.to(device), v=v.to(device))
    return ScoreBias((term,), shape.heads)


def dense(shape: Shape, device: torch.device) -> ScoreBias:
    """A dense bias, one matrix a head, in bf16."""
    values = torch.randn(shape.heads, shape.n, shape.n, device=device).bfloat16()
    return ScoreBias((Dense(bias=values),), shape.heads)


def alibi(shape: Shape, device: torch.device) -> ScoreBias:
    """ALiBi with the slopes of the paper."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, shape.heads + 1, device=device) / shape.heads)
    return ScoreBias((Alibi(slopes=slopes),), shape.heads)


def with_regions(
    make: Callable[[Shape, torch.device], ScoreBias],
) -> Callable[[Shape, torch.device], ScoreBias]:
    """Another bias plus the shift mask of windows (batch, windows)."""

    def both(shape: Shape, device: torch.device) -> ScoreBias:
        ids = torch.randint(4, (shape.batch[-1], shape.n), device=device)
        return make(shape, device) + ScoreBias((Regions(ids=ids),), shape.heads)

    return both


SHAPES: dict[str, Shape] = {
    "swinv2b-s3 no bias": Shape((64,), 16, 576, 32),
    "swinv2b-s3 R=16": Shape((64,), 16, 576, 32, low_rank(16)),
    "swinv2b-s3 R=32": Shape((64,), 16, 576, 32, low_rank(32)),
    "swinv2b-s3 R=16 cosine": Shape(
        (64,), 16, 576, 32, low_rank(16), {"cosine": True, "scale": 10.0}
    ),
    "swinv2b-s3 table cosine": Shape((64,), 16, 576, 32, table, {"cosine": True, "scale": 10.0}),
    "swinv2b-s3 dense cosine": Shape((64,), 16, 576, 32, dense, {"cosine": True, "scale": 10.0}),
    "swinv2b-s1 shift R=16 cosine": Shape(
        (64, 16), 4, 576, 32, with_regions(low_rank(16)), {"cosine": True, "scale": 10.0}
    ),
    "swinv2b-s1 R=16": Shape((1024,), 4, 576, 32, low_rank(16)),
    "pangu R=64": Shape((1024,), 6, 144, 32, low_rank(64)),
    "plain R=16": Shape((1,), 8, 8192, 64, low_rank(16)),
    "non-causal R=16": Shape((2,), 4, 16384, 32, low_rank(16)),
    "alibi gpt2": Shape((8,), 25, 2048, 64, alibi, {"causal": True}),
    "d128 R=16": Shape((4,), 16, 4096, 128, low_rank(16)),
}

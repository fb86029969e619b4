"""Shapes of real attention calls with a bias, and inputs for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import (
    Alibi,
    Axial,
    Dense,
    KeyBias,
    Lookup,
    LowRank,
    Regions,
    RelativeTable,
    ScoreBias,
)
from flashbias_convert.built_terms import cls_window_table
from flashbias_convert.terms.regions import are_in_twos
from flashbias_convert.window_map import WindowMap


@dataclass(frozen=True)
class Shape:
    """One attention call.

    Attributes:
        batch, heads, n, d: sizes of q, k and v (*batch, heads, n, d).
        bias: makes the terms on a device; None for attention without a bias.
        options: keyword arguments of `flashbias_attention`.
        queries: rows of q, the last positions, where there are fewer than keys.
    """

    batch: tuple[int, ...]
    heads: int
    n: int
    d: int
    bias: Callable[[Shape, torch.device], ScoreBias] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    queries: int | None = None

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as an attention module has them: views of one packed projection."""
        return self._views(torch.randn(self._packed(), device=device).to(dtype))

    def unset(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same without numbers, on the CPU: for what depends on sizes alone."""
        return self._views(torch.empty(self._packed(), dtype=dtype))

    def _packed(self) -> tuple[int, ...]:
        return (*self.batch, self.n, 3, self.heads, self.d)

    def _views(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.movedim(-3, 0).transpose(-2, -3).unbind(0)
        return q if self.queries is None else q[..., -self.queries :, :], k, v


def tiny(shape: Shape) -> Shape:
    """Its like of a size for a CPU."""
    side = 4 if round(shape.n**0.5) ** 2 == shape.n else 5
    n = side * side + (shape.bias is cls_table)
    return replace(shape, batch=(1,) * len(shape.batch), heads=2, n=n, d=16)


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
    term = RelativeTable.of_codes(values, u.to(device), v.to(device))
    return ScoreBias((term,), shape.heads)


def offsets(shape: Shape, device: torch.device) -> ScoreBias:
    """A relative table with one entry per offset, as T5's buckets give."""
    token = torch.arange(shape.n, device=device)
    values = torch.randn(shape.heads, 2 * shape.n - 1, device=device)
    term = RelativeTable.of_codes(values, token, shape.n - 1 - token, -1)
    return ScoreBias((term,), shape.heads)


def codes(shape: Shape, device: torch.device) -> ScoreBias:
    """The same, as a table of any codes, such as those of windows."""
    (term,) = offsets(shape, device).terms
    return ScoreBias((replace(term, by_distance=0),), shape.heads)


def pairs(shape: Shape, device: torch.device) -> ScoreBias:
    """The same of an even number of keys, of which a kernel reads the entries of two at once."""
    (term,) = codes(shape, device).terms
    return ScoreBias((replace(term, pairs=True),), shape.heads)


def cls_table(shape: Shape, device: torch.device) -> ScoreBias:
    """A relative table of a square window behind a class token, as BEiT's."""
    side = round((shape.n - 1) ** 0.5)
    values = torch.randn((2 * side - 1) ** 2 + 3, shape.heads, device=device)
    return ScoreBias((cls_window_table(table=values, window=(side, side)),), shape.heads)


def key_bias(shape: Shape, device: torch.device) -> ScoreBias:
    """A number for each key of each head."""
    term = KeyBias(values=torch.randn(shape.heads, shape.n, device=device))
    return ScoreBias((term,), shape.heads)


def lookup(shape: Shape, device: torch.device) -> ScoreBias:
    """512 distances between the nodes of a graph, as Graphormer's."""
    values = torch.randn(shape.heads, 512, device=device)
    code = torch.randint(512, (shape.n, shape.n), dtype=torch.int32, device=device)
    return ScoreBias((Lookup(table=values, code=code),), shape.heads)


def axial(shape: Shape, device: torch.device) -> ScoreBias:
    """Decomposed relative positions of a square image, one table row a query (SAM)."""
    side = round(shape.n**0.5)
    size = (*shape.batch, shape.heads, shape.n, side)
    rel_h, rel_w = (torch.randn(size, device=device).bfloat16() for _ in range(2))
    token = torch.arange(shape.n, device=device)
    term = Axial(rel_h=rel_h, rel_w=rel_w, y=token // side, x=token % side)
    return ScoreBias((term,), shape.heads)


def dense(shape: Shape, device: torch.device) -> ScoreBias:
    """A dense bias, one matrix a head, in bf16."""
    values = torch.randn(shape.heads, shape.n, shape.n, device=device).bfloat16()
    return ScoreBias((Dense(bias=values),), shape.heads)


def alibi(shape: Shape, device: torch.device) -> ScoreBias:
    """ALiBi with the slopes of the paper."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, shape.heads + 1, device=device) / shape.heads)
    return ScoreBias((Alibi(slopes=slopes),), shape.heads)


def shift_ids(n: int, device: torch.device) -> Tensor:
    """Regions of 4 x 4 windows of n tokens on a map that is shifted by half a window.

    As the first stage of SwinV2 has them at 384 pixels: the corner comes first, which is four
    regions, and nine of the windows are one region each.

    Returns:
        Integers, shape (16, n).
    """
    rows = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    window = (rows, n // rows)
    half, size = tuple(side // 2 for side in window), tuple(4 * side for side in window)
    return WindowMap(size, window, half).regions(device).ids.flip(0)


def with_regions(
    make: Callable[[Shape, torch.device], ScoreBias],
) -> Callable[[Shape, torch.device], ScoreBias]:
    """Another bias plus the shift mask of windows, the last dimension of the batch."""

    def both(shape: Shape, device: torch.device) -> ScoreBias:
        ids = shift_ids(shape.n, device)[torch.arange(shape.batch[-1], device=device) % 16]
        own = Regions(ids=ids, pairs=are_in_twos(ids))
        return make(shape, device) + ScoreBias((own,), shape.heads)

    return both


def _short(n: int, d: int, bias: Callable[[Shape, torch.device], ScoreBias] | None) -> Shape:
    """Windows with about 2**28 scores."""
    return Shape((2**28 // (8 * n * n),), 8, n, d, bias)


#: Windows that fill blocks of queries badly, and look-ups by length and head size: for launch
#: settings.
SHORT: dict[str, Shape] = {
    f"N={n} D={d} {name}": _short(n, d, bias)
    for n, d, name, bias in (
        (64, 32, "no bias", None),
        (64, 64, "no bias", None),
        (64, 64, "R=16", low_rank(16)),
        (64, 64, "R=64", low_rank(64)),
        (144, 32, "no bias", None),
        (144, 32, "R=128", low_rank(128)),
        (144, 32, "table", offsets),
        (144, 64, "R=16", low_rank(16)),
        (144, 64, "table", offsets),
        (512, 64, "table", offsets),
        (2048, 64, "table", offsets),
        (4096, 64, "table", offsets),
        (144, 64, "lookup", lookup),
        (512, 64, "lookup", lookup),
        (2048, 64, "lookup", lookup),
        (144, 128, "R=16", low_rank(16)),
        (144, 128, "dense", dense),
        (576, 128, "table", offsets),
        (2048, 32, "R=64", low_rank(64)),
        (384, 32, "dense", dense),
        (577, 64, "dense", dense),
    )
}
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
    "pangu dense": Shape((1024,), 6, 144, 32, dense),
    "plain R=16": Shape((1,), 8, 8192, 64, low_rank(16)),
    "non-causal R=16": Shape((2,), 4, 16384, 32, low_rank(16)),
    "pde R=16": Shape((1,), 8, 32186, 16, low_rank(16)),
    "triangle dense": Shape((1218,), 4, 1218, 32, dense),
    "triangle R=32": Shape((1218,), 4, 1218, 32, low_rank(32)),
    "t5 table": Shape((8,), 12, 512, 64, offsets, {"scale": 1.0}),
    "t5 dense": Shape((8,), 12, 512, 64, dense, {"scale": 1.0}),
    "beit-l 512 table": Shape((16,), 16, 1025, 64, cls_table),
    "sam-b global axial": Shape((4,), 12, 4096, 64, axial),
    "heads of 16 R=8": Shape((16,), 8, 2048, 16, low_rank(8)),
    "alibi D=32": Shape((1,), 50, 8192, 32, alibi, {"causal": True}),
    "decode alibi": Shape((64,), 32, 4096, 64, alibi, {"causal": True}, queries=1),
    "alibi gpt2": Shape((8,), 25, 2048, 64, alibi, {"causal": True}),
    "d128 R=16": Shape((4,), 16, 4096, 128, low_rank(16)),
}

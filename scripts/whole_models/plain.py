"""The plain Transformer of the paper, and attention alone, with a static bias.

Eight layers of 512 channels, 8 heads, 1,024 channels between; batch 1. One static bias serves all
layers, which is kind to whoever stores it as a matrix. It is a product of factors of rank 8, or
ALiBi, so that everybody computes the same function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from flashbias_convert import Alibi, LowRank, ScoreBias
from flashbias_convert.decompose.closed_forms import alibi_slopes
from flashbias_convert.modules import ScoreBiasModule

from .case import BY_ROWS, EXACT, FLEX, FLEX_ALIBI, NO_BIAS, ORIGINAL, SDPA, Case, drawn
from .hand import HandAttention, attention_by_rows, causal_mask, flex_alibi_on

WAYS = (ORIGINAL, SDPA, FLEX, NO_BIAS, EXACT)


@dataclasses.dataclass(frozen=True, eq=False)
class StaticBias:
    """A static bias, before anybody stores it; causal if it is ALiBi.

    Attributes:
        n: tokens.
        phi_q, phi_k: float32 (H, N, R); None for ALiBi.
        slopes: of ALiBi, float32 (H,).
    """

    n: int
    phi_q: Tensor | None = None
    phi_k: Tensor | None = None
    slopes: Tensor | None = None

    @classmethod
    def factors(cls, heads: int, n: int, rank: int, device: torch.device) -> StaticBias:
        """Random factors, always the same; entries of the bias have a variance of one."""
        draw = torch.randn(2, heads, n, rank, generator=torch.Generator().manual_seed(2))
        phi_q, phi_k = draw.to(device).unbind(0)
        return cls(n, phi_q / rank**0.5, phi_k)

    @classmethod
    def alibi(cls, heads: int, n: int, device: torch.device) -> StaticBias:
        """Causal ALiBi."""
        return cls(n, slopes=alibi_slopes(heads, "bloom").to(device))

    @property
    def causal(self) -> bool:
        return self.slopes is not None

    def rows(self, h: int, rows: slice) -> Tensor:
        """Rows of one head, (rows, N), float32; not causal."""
        if self.slopes is None:
            assert self.phi_q is not None and self.phi_k is not None
            return self.phi_q[h, rows] @ self.phi_k[h].T
        token = torch.arange(self.n, device=self.slopes.device)
        return self.slopes[h] * (token - token[rows, None])

    def dense(self, dtype: torch.dtype, *, hide: bool) -> Tensor:
        """The matrix (1, H, N, N); with minus infinity after a query, if it is causal.

        Args:
            dtype: of the result.
            hide: whether to write that; FlexAttention skips those keys.
        """
        some = self.phi_q if self.slopes is None else self.slopes
        assert some is not None
        out = torch.empty(1, len(some), self.n, self.n, dtype=dtype, device=some.device)
        for h in range(len(some)):  # one head at a time: no second matrix in float32
            own = self.rows(h, slice(None))
            if hide and self.causal:
                own.masked_fill_(torch.ones_like(own, dtype=torch.bool).triu_(1), float("-inf"))
            out[0, h] = own
        return out

    def terms(self) -> ScoreBias:
        """As this package adds it."""
        if self.slopes is not None:
            return ScoreBias((Alibi(slopes=self.slopes),), len(self.slopes))
        assert self.phi_q is not None and self.phi_k is not None
        return ScoreBias((LowRank(phi_q=self.phi_q, phi_k=self.phi_k),), len(self.phi_q))


class OriginalAttention(nn.Module):
    """softmax(q k^T * scale + bias) v, with everything that hides keys in the bias."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias
        return scores.softmax(-1) @ v


class OwnAttention(nn.Module):
    """The operator of this package with the terms of the bias."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        self.score_bias = ScoreBiasModule(bias.terms())
        self.score_bias.prepared()
        self.causal = bias.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.score_bias(q, k, v, causal=self.causal)
        return out


class ByRows(nn.Module):
    """See `attention_by_rows`."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias, scale = self.bias, q.shape[-1] ** -0.5
        return attention_by_rows(
            q, k, v, lambda h, rows: bias.rows(h, rows)[None], scale=scale, causal=bias.causal
        )


class FlexAlibi(nn.Module):
    """FlexAttention that computes ALiBi in its score_mod."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        assert bias.slopes is not None
        self.slopes, device = bias.slopes, bias.slopes.device
        self.slots = torch.arange(bias.n, device=device)
        self.blocks = create_block_mask(causal_mask, None, None, bias.n, bias.n, device=device)
        self.attend = flex_alibi_on(device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        return self.attend(q, k, v, self.slopes, self.slots, self.blocks, scale)


def attention(way: str, bias: StaticBias, dtype: torch.dtype, head_dim: int) -> nn.Module:
    """What computes the attention in a way."""
    if way == ORIGINAL:
        return OriginalAttention(bias.dense(dtype, hide=True))
    if way == EXACT:
        return OwnAttention(bias)
    if way == BY_ROWS:
        return ByRows(bias)
    if way == FLEX_ALIBI:
        return FlexAlibi(bias)
    none = torch.empty(1, 1, 1, 1)
    matrix = none if way == NO_BIAS else bias.dense(dtype, hide=way == SDPA)
    return HandAttention(way, matrix, head_dim**-0.5, bias.causal)


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


class AttentionAlone(nn.Module):
    """One call of attention."""

    attend: nn.Module

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.attend(q, k, v)
        return out


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


def alone(
    n: int, batch: int, heads: int, head_dim: int, *, causal: bool = False, rank: int = 8
) -> Case:
    """Attention alone: with ALiBi if it is causal, else with random factors."""

    def inputs(model: Any, way: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        make = StaticBias.alibi(heads, n, device) if causal else None
        bias = make or StaticBias.factors(heads, n, rank, device)
        model.attend = attention(way, bias, dtype, head_dim)
        packed = drawn((n, 3, heads, head_dim), count).to(device, dtype)  # as a projection has it
        return packed.permute(2, 0, 3, 1, 4).unbind(0), {}

    def make(_: torch.device) -> nn.Module:
        return AttentionAlone()

    kind = "causal" if causal else "non-causal"
    name = f"attention {kind}, {heads} heads of {head_dim}, batch {batch}, {n}"
    ways = (*WAYS[:3], FLEX_ALIBI, *WAYS[3:]) if causal else WAYS
    return Case(name, batch, n, ways, make, inputs, _unchanged, ("eager", "compiled"))


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

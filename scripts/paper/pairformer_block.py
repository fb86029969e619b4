"""One Pairformer block of the sizes of AlphaFold 3, written for these measurements.

Random weights, the shapes and products of algorithm 17 of AlphaFold 3, without dropout; layers have
biases where Boltz's classes have them, so that weights fit those.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pairformer_ways import SITE, Call, Way
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import projected_pairs

#: sites where a pair bias is added; the last attends between tokens
SITES = ("starting", "ending", "attention")
#: in order; the last two take and give the single representation
PARTS = ("outgoing", "incoming", "starting", "ending", "pair_transition", "attention",
         "single_transition")  # fmt: skip
Ways = Way | Mapping[str, Way]


class TriangleMultiplication(nn.Module):
    """Algorithms 11 and 12: both edges from i and j to k, or from k to them."""

    def __init__(self, channels: int, outgoing: bool) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.into = nn.Linear(channels, 2 * channels, bias=False)
        self.gates = nn.Linear(channels, 2 * channels, bias=False)
        self.gate = nn.Linear(channels, channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)
        self.equation = "ikc,jkc->ijc" if outgoing else "kic,kjc->ijc"

    def forward(self, z: Tensor) -> Tensor:
        x = self.norm(z)
        a, b = (self.into(x) * self.gates(x).sigmoid()).chunk(2, -1)
        return self.out(self.norm_out(torch.einsum(self.equation, a, b))) * self.gate(x).sigmoid()


class TriangleAttention(nn.Module):
    """Algorithms 13 and 14; `way` attends."""

    def __init__(self, channels: int, heads: int, head_dim: int, starting: bool) -> None:
        super().__init__()
        self.heads, self.starting = heads, starting
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * heads * head_dim, bias=False)
        self.pair_bias = nn.Linear(channels, heads, bias=False)
        self.gate = nn.Linear(channels, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, channels, bias=False)

    def bias(self, z: Tensor) -> Tensor:
        """(H, N, N)."""
        return self._bias(self.norm(self._turned(z)))

    def _bias(self, x: Tensor) -> Tensor:
        return self.pair_bias(x).movedim(-1, 0)

    def _turned(self, z: Tensor) -> Tensor:
        return z if self.starting else z.transpose(0, 1)

    def call(self, z: Tensor) -> Call:
        """What attends."""
        x = self.norm(self._turned(z))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        gate = self.gate(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return Call(
            q, k, v, lambda: self._bias(x), gate, lambda: features(z),
            lambda: projected_pairs(SITE, x, self.pair_bias),
        )  # fmt: skip

    def forward(self, z: Tensor, way: Way) -> Tensor:
        out = self.out(way(self.call(z)).transpose(-2, -3).flatten(-2))
        return out if self.starting else out.transpose(0, 1)


class AttentionPairBias(nn.Module):
    """Algorithm 24, for some samples of one structure: (samples, N, C), (N, N, C')."""

    def __init__(self, single: int, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_z = nn.LayerNorm(single), nn.LayerNorm(channels)
        self.query, self.kv = nn.Linear(single, single), nn.Linear(single, 2 * single, bias=False)
        self.pair_bias = nn.Linear(channels, heads, bias=False)
        self.gate = nn.Linear(single, single, bias=False)
        self.out = nn.Linear(single, single, bias=False)

    def bias(self, z: Tensor) -> Tensor:
        """(H, N, N)."""
        return self.pair_bias(self.norm_z(z)).movedim(-1, 0)

    def call(self, s: Tensor, z: Tensor, bias: Tensor | None = None) -> Call:
        """What attends; a bias that was kept is not projected again."""
        x = self.norm(s)
        q, k, v, gate = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in (self.query(x), *self.kv(x).chunk(2, -1), self.gate(x))
        )
        if bias is not None:
            return Call(q, k, v, lambda: bias, gate, lambda: features(z))
        return Call(
            q, k, v, lambda: self.bias(z), gate, lambda: features(z),
            lambda: projected_pairs(SITE, z, self.pair_bias, self.norm_z),
        )  # fmt: skip

    def forward(self, s: Tensor, z: Tensor, way: Way, bias: Tensor | None = None) -> Tensor:
        return self.out(way(self.call(s, z, bias)).transpose(-2, -3).flatten(-2))


class Transition(nn.Module):
    """Algorithm 11 of AlphaFold 3: SwiGLU of four times the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.wide = nn.Linear(channels, 8 * channels, bias=False)
        self.out = nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return self.out(F.silu(a) * b)


class Pairformer(nn.Module):
    """One block: (1, N, C) and (N, N, C') to the same."""

    def __init__(self, pair: int = 128, heads: int = 4, single: int = 384, single_heads: int = 16):
        super().__init__()
        self.sizes = (pair, heads, single, single_heads)
        self.outgoing = TriangleMultiplication(pair, True)
        self.incoming = TriangleMultiplication(pair, False)
        self.starting = TriangleAttention(pair, heads, pair // heads, True)
        self.ending = TriangleAttention(pair, heads, pair // heads, False)
        self.pair_transition, self.single_transition = Transition(pair), Transition(single)
        self.attention = AttentionPairBias(single, pair, single_heads)

    def part(self, name: str, s: Tensor, z: Tensor, ways: Ways | None = None) -> Tensor:
        """What a part adds to its residual; `ways` is one way, or one per site."""
        module = getattr(self, name)
        if name not in SITES:
            return module(s if name == "single_transition" else z)
        way = ways[name] if isinstance(ways, Mapping) else ways
        return module(s, z, way) if name == "attention" else module(z, way)

    def forward(
        self, s: Tensor, z: Tensor, ways: Ways, seen: dict[str, tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`seen` gets what enters each part."""
        for name in PARTS:
            if seen is not None:
                seen[name] = (s, z)
            made = self.part(name, s, z, ways)
            if name in PARTS[-2:]:
                s = s + made
            else:
                z = z + made
        return s, z


def features(z: Tensor) -> Tensor:
    """What factor networks see of the tokens of a structure, (N, 3 C'), fp32."""
    return pair_features(z, diagonal=True)


def protein(
    n: int, channels: int, single: int, device: str, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Single and pair representation of a random chain, (1, N, C) and (N, N, C').

    Chains of other seeds are other structures of the same model.
    """
    draw, weights = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(12345)
    places = torch.randn(n, 3, generator=draw).cumsum(0).to(device)
    tokens = torch.randn(n, 8, generator=draw).to(device)
    distance = torch.cdist(places, places)
    near = (-(distance[..., None] - torch.linspace(0, 30, 16, device=device)).square() / 8).exp()
    mix, own = (torch.randn(k, channels, generator=weights).to(device) for k in (16, 8))
    z = near @ mix + (tokens @ own)[:, None] - (tokens @ own.flip(0))[None]
    s = tokens @ torch.randn(8, single, generator=weights).to(device)
    return s[None].to(dtype), z.to(dtype)

"""One Pairformer block of the sizes of AlphaFold 3, and ways to attend with its pair biases.

The block is written for these measurements: random weights, the shapes and products of algorithm
17 of AlphaFold 3, without dropout. A way is a function of q, k, v and a dense bias.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import Dense, LowRank, ScoreBias, flashbias_attention
from flashbias_convert.attention import PreparedBias
from flashbias_convert.benchmark.peers import Flex
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.randomised import quick_factors
from flashbias_convert.pair_features import pair_features

#: q, k, v (rows, H, N, D), bias (H, N, N) in the dtype of q -> (rows, H, N, D)
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class TriangleMultiplication(nn.Module):
    """Algorithms 11 and 12: both edges from i and j to k, or from k to them."""

    def __init__(self, channels: int, outgoing: bool) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.into, self.gates = nn.Linear(channels, 2 * channels), nn.Linear(channels, 2 * channels)
        self.gate, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)
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
        self.gate = nn.Linear(channels, heads * head_dim)
        self.out = nn.Linear(heads * head_dim, channels)

    def inputs(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The normed pairs, q, k, v and the bias."""
        x = self.norm(z if self.starting else z.transpose(0, 1))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x, q, k, v, self.pair_bias(x).movedim(-1, 0)

    def forward(self, z: Tensor, way: Way) -> Tensor:
        x, q, k, v, bias = self.inputs(z)
        out = way(q, k, v, bias).transpose(-2, -3).flatten(-2)
        out = self.out(out * self.gate(x).sigmoid())
        return out if self.starting else out.transpose(0, 1)


class AttentionPairBias(nn.Module):
    """Algorithm 24, for some samples of one structure: (samples, N, C), (N, N, C')."""

    def __init__(self, single: int, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_z = nn.LayerNorm(single), nn.LayerNorm(channels)
        self.qkv = nn.Linear(single, 3 * single)
        self.pair_bias = nn.Linear(channels, heads, bias=False)
        self.gate, self.out = nn.Linear(single, single), nn.Linear(single, single)

    def bias(self, z: Tensor) -> Tensor:
        return self.pair_bias(self.norm_z(z)).movedim(-1, 0)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, s: Tensor, z: Tensor, way: Way, bias: Tensor | None = None) -> Tensor:
        x = self.norm(s)
        out = way(*self.queries(x), self.bias(z) if bias is None else bias)
        return self.out(out.transpose(-2, -3).flatten(-2) * self.gate(x).sigmoid())


class Transition(nn.Module):
    """Algorithm 11 of AlphaFold 3: SwiGLU of four times the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.wide, self.out = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return self.out(F.silu(a) * b)


class Pairformer(nn.Module):
    """One block: (1, N, C) and (N, N, C') to the same."""

    def __init__(self, pair: int = 128, heads: int = 4, single: int = 384, single_heads: int = 16):
        super().__init__()
        self.outgoing = TriangleMultiplication(pair, True)
        self.incoming = TriangleMultiplication(pair, False)
        self.starting = TriangleAttention(pair, heads, pair // heads, True)
        self.ending = TriangleAttention(pair, heads, pair // heads, False)
        self.pair_transition, self.single_transition = Transition(pair), Transition(single)
        self.attention = AttentionPairBias(single, pair, single_heads)

    def forward(self, s: Tensor, z: Tensor, way: Way) -> Tensor:
        z = z + self.outgoing(z)
        z = z + self.incoming(z)
        z = z + self.starting(z, way)
        z = z + self.ending(z, way)
        z = z + self.pair_transition(z)
        s = s + self.attention(s, z, way)
        s = s + self.single_transition(s)
        return s.sum() + z.sum()


# -- ways ----------------------------------------------------------------------------------


def library(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As OpenFold and its followers do without a kernel: scores of some rows, then the next."""
    rows = 512 if q.shape[-2] <= 384 else 128
    parts = []
    for at in range(0, len(q), rows):
        some = slice(at, at + rows)
        scores = q[some] * q.shape[-1] ** -0.5 @ k[some].mT
        scores += bias
        parts.append(scores.softmax(-1) @ v[some])
    return torch.cat(parts)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """torch's attention; without aligned rows of the mask its kernels copy it for each row."""
    n, wide = bias.shape[-1], -(-bias.shape[-1] // 16) * 16
    mask = F.pad(bias, (0, wide - n))[..., :n]
    return F.scaled_dot_product_attention(q, k, v, mask.expand(len(q), -1, -1, -1))


def flex() -> Way:
    run = Flex()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = run.attend(q, k, v, bias.contiguous(), None, None, q.shape[-1] ** -0.5)
        return out

    return attend


def cuequivariance(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """NVIDIA's kernel for triangles, whose bias is fp32."""
    from cuequivariance_torch.primitives.triangle import triangle_attention

    mask = torch.ones(1, len(q), 1, 1, q.shape[-2], dtype=torch.bool, device=q.device)
    tensors = (x[None] for x in (q, k, v))
    wide = bias.float()[None, None]
    return triangle_attention(*tensors, wide, mask=mask, scale=q.shape[-1] ** -0.5)[0]


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Ours, exact."""
    return flashbias_attention(q, k, v, ScoreBias((Dense(bias=bias),), len(bias)))


def factors(rank: int) -> Way:
    """Ours, with factors from a randomised SVD in each call."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashbias_attention(q, k, v, ScoreBias((quick_factors(bias, rank),), len(bias)))

    return attend


def kept(bias: Tensor, rank: int) -> Way:
    """Ours, with factors that were made once of this bias."""
    terms: tuple[LowRank, ...] = (quick_factors(bias, rank),)
    prepared = PreparedBias(ScoreBias(terms, len(bias)))
    return lambda q, k, v, _: flashbias_attention(q, k, v, prepared)


def networks(pairs: Tensor, heads: int, rank: int) -> Way:
    """Ours, with factors from networks that were not trained: for its time alone.

    Args:
        pairs: pair representation (N, N, C), whose means are made anew in each call.
        heads: H.
        rank: R; hidden layers are 256 wide.
    """
    count = 2 * pairs.shape[-1]
    config = {"q_features": count, "k_features": count, "heads": heads, "rank": rank, "hidden": 256}
    made = FactorNetworks.from_config(config).to(pairs.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        x = pair_features(pairs)
        return flashbias_attention(q, k, v, ScoreBias((made.make(x_q=x, x_k=x),), heads))

    return attend


def exact_ways(compiles: bool = True) -> dict[str, Way]:
    """What takes any bias as it is, by name.

    Args:
        compiles: FlexAttention, too, which has to be compiled for each shape.
    """
    ways = {"library": library, "SDPA": sdpa, "ours, dense": dense}
    if compiles:
        ways["FlexAttention"] = flex()
    if importlib.util.find_spec("cuequivariance_torch") is not None:
        ways["cuEquivariance"] = cuequivariance
    return ways

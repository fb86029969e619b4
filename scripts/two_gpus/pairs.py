"""Layers of attention whose biases are projected from pairs, with random weights."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from flashbias_convert.pair_features import pair_features
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Observed, Recipe, Site

HEADS, HEAD_DIM, PAIR, SINGLE = 4, 8, 16, 32


class PairAttention(nn.Module):
    """Tokens attend with a bias from their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(SINGLE, 3 * HEADS * HEAD_DIM)
        self.pair_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, SINGLE)

    def heads_of(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(s).unflatten(-1, (3, HEADS, HEAD_DIM)).movedim(-3, 0)
        q, k, v = qkv.transpose(-2, -3).unbind(0)
        return q, k, v

    def forward(self, s: Tensor, z: Tensor) -> Tensor:
        q, k, v = self.heads_of(s)
        scores = q @ k.mT * HEAD_DIM**-0.5 + self.pair_bias(z).movedim(-1, -3)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))
        return out


class FlashPairAttention(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.pair_bias.weight,)

    def flashbias_forward(self, s: Tensor, z: Tensor) -> Tensor:
        q, k, v = self.heads_of(s)
        x = pair_features(z, s)
        built = {"factor_network": {"x_q": x, "x_k": x}}
        out = self.score_bias(q, k, v, scale=HEAD_DIM**-0.5, built=built)
        done: Tensor = self.out(out.transpose(-2, -3).flatten(-2))
        return done


def observe(module: PairAttention, s: Tensor, z: Tensor) -> Observed:
    x, bias = pair_features(z, s), module.pair_bias(z).movedim(-1, -3)
    return Observed(x, x, bias, None, *module.heads_of(s), scale=HEAD_DIM**-0.5)


def describe(site: Site) -> Description:
    return Description(None, HEADS, 0, 0, HEAD_DIM, depends_on_input=True)


RECIPE = Recipe(
    name="pairs",
    title="attention with pair biases",
    classes=(f"{__name__}.PairAttention",),
    library="torch",
    tested=">=2",
    attention=FlashPairAttention,
    describe=describe,
    observe=observe,
)


class PairModel(nn.Module):
    """Layers one after the other; the pairs stay what they are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(PairAttention() for _ in range(depth))

    def forward(self, s: Tensor, z: Tensor) -> Tensor:
        for layer in self.layers:
            s = s + layer(s, z)
        return s


def pair_inputs(tokens: int) -> dict[str, Tensor]:
    """Four structures whose pairs are made of their tokens."""
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(4, tokens, SINGLE, generator=generator)
    mix = torch.randn(2, SINGLE, PAIR, generator=generator) * SINGLE**-0.5
    return {"s": s, "z": (s @ mix[0]).sin()[:, :, None] + (s @ mix[1])[:, None]}

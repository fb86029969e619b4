"""Attention with pair bias by the interfaces of Boltz, Protenix and OpenFold, which few have here.

They compute what the originals do, without kernels, chunks and windows, so that recipes run where
none of the packages is installed; `tests/recipes/pair_models.py` has the real ones.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from flashbias_convert.recipe import Recipe
from flashbias_convert.recipes import (
    boltz_pair_bias,
    boltz_triangle,
    openfold3_pair_bias,
    openfold3_triangle,
    openfold_msa,
    openfold_triangle,
    protenix_pair_bias,
    protenix_triangle,
)

PAIR, SINGLE, HEADS, WIDTH = 8, 12, 2, 4


class Attention(nn.Module):
    """OpenFold's, with a gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.no_heads = self.num_heads = HEADS
        self.c_hidden = WIDTH
        inner = HEADS * WIDTH
        self.linear_q, self.linear_k, self.linear_v = (
            nn.Linear(channels, inner, bias=False) for _ in range(3)
        )
        self.linear_g, self.linear_o = nn.Linear(channels, inner), nn.Linear(inner, channels)

    def _prep_qkv(self, q_x: Tensor, kv_x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
            for layer, x in ((self.linear_q, q_x), (self.linear_k, kv_x), (self.linear_v, kv_x))
        )
        return q / math.sqrt(WIDTH), k, v

    def forward(self, x: Tensor, biases: list[Tensor]) -> Tensor:
        q, k, v = self._prep_qkv(x, x)
        scores = q @ k.mT
        for bias in biases:
            scores = scores + bias
        out = (scores.softmax(-1) @ v).transpose(-2, -3)
        gated = out * self.linear_g(x).sigmoid().unflatten(-1, (HEADS, -1))
        merged: Tensor = self.linear_o(gated.flatten(-2))
        return merged


def hiding(mask: Tensor | None) -> list[Tensor]:
    """What a mask (*, N) of ones and zeros adds to scores (*, H, N, N)."""
    return [] if mask is None else [(1e9 * (mask - 1))[..., None, None, :]]


class Triangle(nn.Module):
    """`TriangleAttention` of all of them; the ending node."""

    def __init__(self) -> None:
        super().__init__()
        self.no_heads, self.c_hidden, self.starting = HEADS, WIDTH, False
        self.layer_norm, self.linear = nn.LayerNorm(PAIR), nn.Linear(PAIR, HEADS, bias=False)
        self.mha = Attention(PAIR)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.layer_norm(x.transpose(-2, -3))
        seen = None if mask is None else mask.transpose(-1, -2)
        bias = self.linear(x).movedim(-1, -3).unsqueeze(-4)
        out: Tensor = self.mha(x, [*hiding(seen), bias])
        return out.transpose(-2, -3)


class OpenFoldRows(nn.Module):
    """`MSARowAttentionWithPairBias`."""

    def __init__(self) -> None:
        super().__init__()
        self.no_heads, self.c_hidden, self.pair_bias = HEADS, WIDTH, True
        self.layer_norm_m, self.layer_norm_z = nn.LayerNorm(SINGLE), nn.LayerNorm(PAIR)
        self.linear_z, self.mha = nn.Linear(PAIR, HEADS, bias=False), Attention(SINGLE)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor | None = None) -> Tensor:
        bias = self.linear_z(self.layer_norm_z(z)).movedim(-1, -3).unsqueeze(-4)
        out: Tensor = self.mha(self.layer_norm_m(m), [*hiding(mask), bias])
        return out


class OpenFold3Pairs(nn.Module):
    """`AttentionPairBias` of OpenFold 3, as its pairformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_a, self.layer_norm_z = nn.LayerNorm(SINGLE), nn.LayerNorm(PAIR)
        self.linear_z, self.mha = nn.Linear(PAIR, HEADS, bias=False), Attention(SINGLE)

    def forward(
        self, a: Tensor, z: Tensor, s: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        bias = self.linear_z(self.layer_norm_z(z)).movedim(-1, -3)
        out: Tensor = self.mha(self.layer_norm_a(a), [*hiding(mask), bias])
        return out


class ProtenixPairs(nn.Module):
    """`AttentionPairBias` of Protenix, as its pairformer has it."""

    has_s, cross_attention_mode, n_heads = False, False, HEADS

    def __init__(self) -> None:
        super().__init__()
        self.layernorm_a, self.layernorm_z = nn.LayerNorm(SINGLE), nn.LayerNorm(PAIR)
        self.linear_nobias_z = nn.Linear(PAIR, HEADS, bias=False)
        self.attention = Attention(SINGLE)

    def forward(self, a: Tensor, s: Tensor, z: Tensor) -> Tensor:
        bias = self.linear_nobias_z(self.layernorm_z(z)).movedim(-1, -3)
        out: Tensor = self.attention(self.layernorm_a(a), [bias])
        return out


class HeadsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


class BoltzPairs(nn.Module):
    """`AttentionPairBias` of Boltz-1; Boltz-2's takes the input of the keys by name."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.initial_norm = HEADS, SINGLE // HEADS, True
        self.norm_s = nn.LayerNorm(SINGLE)
        self.proj_q = nn.Linear(SINGLE, SINGLE)
        self.proj_k, self.proj_v, self.proj_g, self.proj_o = (
            nn.Linear(SINGLE, SINGLE, bias=False) for _ in range(4)
        )
        bias = nn.Linear(PAIR, HEADS, bias=False)
        self.proj_z = nn.Sequential(nn.LayerNorm(PAIR), bias, HeadsFirst())

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int = 1) -> Tensor:
        s = self.norm_s(s)
        q, k, v = (
            layer(s).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.proj_q, self.proj_k, self.proj_v)
        )
        scores = q @ k.mT / math.sqrt(self.head_dim)
        scores = scores + self.proj_z(z).repeat_interleave(multiplicity, 0)
        scores = scores + (1 - mask[:, None, None]) * -1e6
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        merged: Tensor = self.proj_o(self.proj_g(s).sigmoid() * out)
        return merged


def _taken(recipe: Recipe, cls: type[nn.Module]) -> tuple[type[nn.Module], Recipe]:
    classes = (f"{cls.__module__}.{cls.__qualname__}",)
    return cls, dataclasses.replace(recipe, classes=classes)


#: what stands in, and its recipe
STAND_INS = {
    "boltz_triangle": _taken(boltz_triangle.recipe, Triangle),
    "openfold_triangle": _taken(openfold_triangle.recipe, Triangle),
    "openfold3_triangle": _taken(openfold3_triangle.recipe, Triangle),
    "protenix_triangle": _taken(protenix_triangle.recipe, Triangle),
    "openfold_msa": _taken(openfold_msa.recipe, OpenFoldRows),
    "openfold3_pair_bias": _taken(openfold3_pair_bias.recipe, OpenFold3Pairs),
    "protenix_pair_bias": _taken(protenix_pair_bias.recipe, ProtenixPairs),
    "boltz_pair_bias": _taken(boltz_pair_bias.recipe, BoltzPairs),
}


def inputs(name: str, tokens: int = 9, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of a call, for two structures of which one is padded; the same numbers in each dtype."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    z, mask = numbers(2, tokens, tokens, PAIR), torch.ones(2, tokens, dtype=dtype)
    mask[0, -3:] = 0
    pairs = mask[:, :, None].expand(-1, -1, tokens) * mask[:, None, :]
    if name.endswith("triangle"):
        return {"x": z, "mask": pairs}
    if name == "openfold_msa":
        own = mask[:, None].repeat(1, 3, 1)
        own[:, 1, 2] = 0  # a gap in one sequence
        return {"m": numbers(2, 3, tokens, SINGLE), "z": z, "mask": own}
    single = numbers(2, tokens, SINGLE)
    return {
        "openfold3_pair_bias": {"a": single, "z": z, "mask": mask},
        "protenix_pair_bias": {"a": single, "s": single, "z": z},
        "boltz_pair_bias": {"s": single, "z": z, "mask": mask},
    }[name]

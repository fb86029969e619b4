"""A small attention with a learned bias, and its recipe, for tests of the engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site


class BiasedAttention(nn.Module):
    """Multi-head self-attention over `tokens` tokens with a parameter (H, N, N) as bias."""

    def __init__(self, dim: int = 16, heads: int = 2, tokens: int = 36) -> None:
        super().__init__()
        self.heads, self.tokens = heads, tokens
        self.qkv = nn.Linear(dim, 3 * dim)
        self.table = nn.Parameter(_smooth(heads, tokens))
        self.attn_drop = nn.Dropout(0.2)
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + self.table
        out = self.attn_drop(scores.softmax(-1)) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


def _smooth(heads: int, tokens: int) -> Tensor:
    """A bias of low rank with a little noise, large enough to matter."""
    phi_q, phi_k = torch.randn(2, heads, tokens, 3).unbind(0)
    return 2 * phi_q @ phi_k.transpose(-2, -1) + 0.1 * torch.randn(heads, tokens, tokens)


class FlashBiasedAttention(PatchedAttention):
    bypassed = ("attn_drop",)
    head_counts = ("heads",)
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({"qkv": 3})

    heads: int
    tokens: int
    table: nn.Parameter
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.table, self.tokens)

    def flashbias_forward(self, x: Tensor) -> Tensor:
        q, k, v = BiasedAttention.project(self, x)  # type: ignore[arg-type]
        return self.proj(self.score_bias(q, k, v).transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    module = site.module
    assert isinstance(module, BiasedAttention)
    n = module.tokens
    return Description(
        bias=module.table, num_heads=module.heads, n=n, m=n, head_dim=16 // module.heads
    )


def make_recipe(**changes: object) -> Recipe:
    """The recipe of `BiasedAttention`, with fields replaced."""
    fields: dict[str, object] = {
        "name": "toy",
        "title": "a toy",
        "classes": (f"{__name__}.BiasedAttention",),
        "library": "torch",
        "tested": ">=2",
        "attention": FlashBiasedAttention,
        "describe": describe,
    }
    return Recipe(**{**fields, **changes})  # type: ignore[arg-type]


TOY = make_recipe()


class ToyModel(nn.Module):
    """Attention in a list of blocks, each with a residual connection."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": BiasedAttention(), "mlp": nn.Linear(16, 16)})
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["mlp"](block["attn"](x))
        return x


def make_model(depth: int = 3, seed: int = 0) -> ToyModel:
    """A model in eval mode with reproducible weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ToyModel(depth).eval()


def make_input(seed: int = 1) -> Tensor:
    """Shape (2, 36, 16)."""
    return torch.randn(2, 36, 16, generator=torch.Generator().manual_seed(seed))

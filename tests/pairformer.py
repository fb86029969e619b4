"""Small attention with a bias from a pair representation, as in AlphaFold 3, and its recipes."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from flashbias_convert.pair_features import pair_features
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Observed, Recipe, Site

PAIR, SINGLE, HEADS = 6, 8, 2


class TriangleAttention(nn.Module):
    """Row i of the pair representation attends along k with a bias that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(PAIR)
        self.qkv = nn.Linear(PAIR, 3 * HEADS * 4)
        self.pair_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.out = nn.Linear(HEADS * 4, PAIR)

    def heads_of(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of shape (B, I, H, J, D)."""
        q, k, v = self.qkv(z).unflatten(-1, (3, HEADS, 4)).movedim(-3, 0).transpose(-2, -3)
        return q, k, v

    def bias(self, z: Tensor) -> Tensor:
        """(B, J, K, C) -> (B, 1, H, J, K)."""
        out: Tensor = self.pair_bias(z).movedim(-1, -3).unsqueeze(1)
        return out

    def merge(self, out: Tensor) -> Tensor:
        merged: Tensor = self.out(out.transpose(-2, -3).flatten(-2))
        return merged

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """z (B, N, N, C), mask (B, N) True for tokens that count."""
        z = self.norm(z)
        q, k, v = self.heads_of(z)
        scores = q @ k.mT * 0.5 + self.bias(z)
        scores = scores.masked_fill(~mask[:, None, None, None, :], -torch.inf)
        return self.merge(scores.softmax(-1) @ v)


class AttentionPairBias(nn.Module):
    """Tokens attend with a bias from the pair representation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(PAIR)
        self.qkv = nn.Linear(SINGLE, 3 * HEADS * 4)
        self.pair_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.out = nn.Linear(HEADS * 4, SINGLE)

    def heads_of(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(s).unflatten(-1, (3, HEADS, 4)).movedim(-3, 0).transpose(-2, -3)
        return q, k, v

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads_of(s)
        scores = q @ k.mT * 0.5 + self.pair_bias(self.norm(z)).movedim(-1, -3)
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        merged: Tensor = self.out((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))
        return merged


class PairModel(nn.Module):
    """One block: triangle attention, then attention with pair bias."""

    def __init__(self) -> None:
        super().__init__()
        self.triangle, self.pair = TriangleAttention(), AttentionPairBias()

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        z = z + self.triangle(z, mask)
        out: Tensor = s + self.pair(s, z, mask)
        return out


# -- recipes -------------------------------------------------------------------------------


class FlashTriangle(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.pair_bias.weight, self.norm.weight, self.norm.bias)

    def flashbias_forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.norm(z)
        q, k, v = self.heads_of(z)
        x = pair_features(z, mask=mask).unsqueeze(1)
        key_mask = mask[:, None, :].expand(-1, z.shape[1], -1)
        out = self.score_bias(
            q, k, v, scale=0.5, key_mask=key_mask, built={"factor_network": {"x_q": x, "x_k": x}}
        )
        return self.merge(out)


class FlashPairBias(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.pair_bias.weight, self.norm.weight, self.norm.bias)

    def flashbias_forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads_of(s)
        x = pair_features(self.norm(z), s, mask)
        out = self.score_bias(
            q, k, v, scale=0.5, key_mask=mask, built={"factor_network": {"x_q": x, "x_k": x}}
        )
        merged: Tensor = self.out(out.transpose(-2, -3).flatten(-2))
        return merged


def observe_triangle(module: TriangleAttention, z: Tensor, mask: Tensor) -> Observed:
    z = module.norm(z)
    q, k, v = module.heads_of(z)
    x = pair_features(z, mask=mask).unsqueeze(1)
    return Observed(x, x, module.bias(z), mask[:, None], q, k, v, scale=0.5)


def observe_pair(module: AttentionPairBias, s: Tensor, z: Tensor, mask: Tensor) -> Observed:
    z = module.norm(z)
    x = pair_features(z, s, mask)
    bias = module.pair_bias(z).movedim(-1, -3)
    return Observed(x, x, bias, mask, *module.heads_of(s), scale=0.5)


def describe(site: Site) -> Description:
    return Description(None, HEADS, 0, 0, 4, depends_on_input=True)


def _recipe(name: str, attention: type[PatchedAttention], observe: object) -> Recipe:
    cls = {FlashTriangle: TriangleAttention, FlashPairBias: AttentionPairBias}[attention]  # type: ignore[index]
    return Recipe(
        name=name,
        title="a toy of AlphaFold 3",
        classes=(f"{__name__}.{cls.__name__}",),
        library="torch",
        tested=">=2",
        attention=attention,
        describe=describe,
        observe=observe,  # type: ignore[arg-type]
    )


TRIANGLE = _recipe("toy_triangle", FlashTriangle, observe_triangle)
PAIR_BIAS = _recipe("toy_pair_bias", FlashPairBias, observe_pair)
RECIPES = (TRIANGLE, PAIR_BIAS)


def make_model(seed: int = 0) -> PairModel:
    """In evaluation mode, with biases large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PairModel().eval()
        with torch.no_grad():
            for module in (model.triangle, model.pair):
                module.pair_bias.weight.mul_(4)
        return model


def make_inputs(proteins: int = 6, tokens: int = 20, seed: int = 1) -> dict[str, Tensor]:
    """A pair representation made of single tokens; the last protein is padded."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(proteins, tokens, SINGLE, generator=generator)
    mix = torch.randn(2, SINGLE, PAIR, generator=torch.Generator().manual_seed(7))
    z = (s @ mix[0])[:, :, None] + (s @ mix[1])[:, None]
    mask = torch.ones(proteins, tokens, dtype=torch.bool)
    mask[-1, tokens - 3 :] = False
    return {"s": s, "z": z, "mask": mask}

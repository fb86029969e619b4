"""ALiBi with the interface of github.com/jaketae/alibi, which no package offers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model
from flashbias_convert.errors import StaleTermsError
from tests.recipes.model_parity import PATHS, Case, check_training, randomised
from tests.support import assert_parity

WIDTH, HEADS, LONGEST = 24, 6, 40


class ALiBiMultiHeadAttention(nn.Module):
    """The same attributes and the same sums, written anew; slopes 256^(-i/H) for any H."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.num_heads, self.scale = causal, HEADS, math.sqrt(WIDTH)
        slopes = 256.0 ** (-torch.arange(1, HEADS + 1) / HEADS)
        self.register_buffer("m", slopes[:, None, None])
        self.kqv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        if causal:
            self.register_buffer("mask", torch.ones(1, 1, LONGEST, LONGEST).tril())

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.kqv(x).chunk(3, -1)
        ]
        k, q, v = parts
        place = torch.arange(x.shape[1])
        scores = q @ k.mT / self.scale + self.m * (place[None, :] - place[:, None])
        if self.causal:
            n = x.shape[1]
            scores = scores.masked_fill(self.mask[..., :n, :n] == 0, -math.inf)
        return self.dropout((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


ALiBiMultiHeadAttention.__module__ = "alibi.attention"


class Model(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ALiBiMultiHeadAttention(causal) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def run(model: nn.Module) -> Tensor:
    x = torch.randn(2, 30, WIDTH, generator=torch.Generator().manual_seed(1))
    out: Tensor = model(x.bfloat16().half().to(next(model.parameters()).dtype))
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "backend"), PATHS)
def test_values(causal: bool, dtype: torch.dtype, backend: str) -> None:
    case = Case(lambda: randomised(Model(causal), std=0.5), run, (), {"patched": 2})
    model = case.make()
    for layer in model.layers:  # the slopes that every dtype holds
        layer.m.copy_(layer.m.bfloat16().half())
    model = model.to(dtype)
    plain = case.output(model)
    truth = case.output(copy.deepcopy(model).double())
    case.patched(model, backend)
    assert_parity(case.output(model), plain, truth)
    for layer in model.layers:
        layer.m.zero_()
    with pytest.raises(StaleTermsError):
        case.output(model)


@pytest.mark.parametrize("causal", [False, True])
def test_training_is_the_original(causal: bool) -> None:
    """Its slopes are a buffer, which gets no gradient: see that of the projections."""
    check_training(
        Case(lambda: randomised(Model(causal), std=0.5), run, ("kqv.weight",), {"patched": 2})
    )


def test_more_tokens_than_the_mask_has_are_refused() -> None:
    model = Model(causal=True).eval()
    patch_model(model, backend="sdpa")
    with pytest.raises(ValueError, match="max_len"), torch.no_grad():
        model(torch.zeros(1, LONGEST + 1, WIDTH))

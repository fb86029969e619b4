"""The reference is differentiable: its gradients are those of finite differences, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashbias_convert import ScoreBias
from flashbias_convert.attention import flashbias_attention

from .cases import BIASES, Inputs

#: Sizes at which a query, a key, a feature too many or too few would show.
SIZES = {"n": 3, "m": 5, "d": 3, "dv": 2, "heads": 2, "batch": (2,)}


def tensors_of(bias: ScoreBias | None) -> list[Tensor]:
    """The tensors of a bias that have gradients, in float64."""
    named = [] if bias is None else bias.named_tensors()
    return [t.double().requires_grad_() for _, t in named if t.is_floating_point()]


def with_tensors(bias: ScoreBias | None, tensors: list[Tensor]) -> ScoreBias | None:
    """The bias with other tensors in place of those of `tensors_of`."""
    if bias is None:
        return None
    rest = iter(tensors)
    terms = [t.map_tensors(lambda _, x: next(rest) if x.is_floating_point() else x)
             for t in bias.terms]  # fmt: skip
    return dataclasses.replace(bias, terms=tuple(terms))


def check(x: Inputs, bias: ScoreBias | None, **options: object) -> None:
    qkv = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    scale = options.pop("scale", None)
    learnt = [scale.double().requires_grad_()] if isinstance(scale, Tensor) else []

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        own = with_tensors(bias, list(rest[len(learnt) :]))
        first = rest[0] if learnt else scale
        return flashbias_attention(q, k, v, own, scale=first, backend="eager", **options)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(call, (*qkv, *learnt, *tensors_of(bias)), fast_mode=True)


@pytest.mark.parametrize("name", BIASES)
def test_every_bias(name: str) -> None:
    x = Inputs(torch.device("cpu"), **SIZES)  # type: ignore[arg-type]
    check(x, BIASES[name](x), causal=True, scale=torch.tensor([0.7, -1.3]))


OPTIONS: dict[str, Callable[[Inputs], dict[str, object]]] = {
    "cosine": lambda x: {"cosine": True, "scale": torch.tensor([5.0, 2.0])},
    "masked": lambda x: {"key_mask": torch.tensor([[True, False, True, True, False]] * 2)},
    "nothing-visible": lambda x: {"key_mask": torch.tensor([[False] * 5, [True] * 5])},
    "placed": lambda x: {"causal": True, "query_start": torch.tensor([0, 3])},
    "zero-scale": lambda x: {"scale": torch.zeros(2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str) -> None:
    x = Inputs(torch.device("cpu"), **SIZES)  # type: ignore[arg-type]
    check(x, x.bias(x.low_rank(2), x.diagonal(), x.table(4)), **OPTIONS[name](x))


def test_grouped_query_heads() -> None:
    x = Inputs(torch.device("cpu"), **{**SIZES, "heads": 4, "kv_heads": 2})  # type: ignore[arg-type]
    check(x, x.bias(x.low_rank(1, heads=(0, 3)), x.key_bias()))

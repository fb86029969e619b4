"""A term that all layers of a call have in common is made once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.attention import PreparedBias
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.terms import Alibi, ScoreBias, Term

H, N, M = 3, 4, 7


def layer(*terms: Term, heads: int = H) -> ScoreBiasModule:
    return ScoreBiasModule(ScoreBias(terms, heads), "sdpa", builders=("distance_table",))


def table(heads: int = H) -> Tensor:
    return torch.randn(heads, N + M - 1)


def plain(values: Tensor, n: int, m: int) -> Tensor:
    return values[:, torch.arange(m) + torch.arange(n - 1, -1, -1)[:, None]]


def bias_of(module: ScoreBiasModule, **inputs: Any) -> PreparedBias:
    return module.of_call({"distance_table": {"n": N, **inputs}})[0]


def test_layers_share_what_the_first_one_makes() -> None:
    shared = table()
    first, second = bias_of(layer(), table=shared), bias_of(layer(), table=shared)
    assert first is second
    assert torch.equal(first.bias.dense(N, M), plain(shared, N, M))
    assert first.packed(True, 1.0) is first.packed(True, 1.0)


@pytest.mark.parametrize("n", [N, N - 1])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("own", [(), (Alibi(slopes=torch.rand(H)),)], ids=["alone", "own terms"])
@pytest.mark.parametrize("change", [torch.clone, lambda t: t.add_(1)], ids=["another", "changed"])
def test_others_have_their_own(change: Any, own: tuple[Term, ...], gated: bool, n: int) -> None:
    shared = table()
    before = bias_of(layer(), table=shared)
    other = change(shared)
    gate = {"gate": torch.rand(1, H, n)} if gated else {}
    found = bias_of(layer(*own), table=other, n=n, **gate)
    m = N + M - n
    wanted = plain(other, n, m) * gate.get("gate", torch.ones(1))[..., None]
    wanted = sum((term.dense(n, m) for term in own), start=wanted)
    assert found is not before
    torch.testing.assert_close(found.bias.dense(n, m), wanted.reshape(found.bias.dense(n, m).shape))


def test_one_table_for_all_heads_serves_layers_with_other_heads() -> None:
    shared = table(1)
    assert bias_of(layer(), table=shared).bias.num_heads == H
    assert bias_of(layer(heads=2), table=shared).bias.num_heads == 2


def test_gradients_reach_a_table() -> None:
    shared = table().requires_grad_()
    bias_of(layer(), table=shared).bias.dense(N, M).sum().backward()
    assert shared.grad is not None and bool((shared.grad > 0).all())
    with torch.no_grad():
        assert bias_of(layer(), table=shared) is bias_of(layer(), table=shared)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_outlives_the_table(mode: Any) -> None:
    with mode():
        shared = table()
        made = bias_of(layer(), table=shared)
        made.packed(True, 1.0)
    known = [weakref.ref(shared), weakref.ref(made)]
    del made
    gc.disable()
    try:
        del shared
        assert all(ref() is None for ref in known)
    finally:
        gc.enable()

"""A term that all layers of a call have in common is made once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import common_terms
from flashbias_convert.attention import PreparedBias
from flashbias_convert.common_terms import numbers_of
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


def padded(places: Tensor, slopes: Tensor, start: Any = 0) -> PreparedBias:
    module = ScoreBiasModule(
        ScoreBias((Alibi(slopes=slopes),), H), "sdpa", builders=("padded_alibi",)
    )
    inputs = {"slopes": slopes, "places": places, "start": start, "n": N}
    return module.of_call({"padded_alibi": inputs})[0]


def test_slopes_are_told_by_their_numbers() -> None:
    """Every layer has a copy of them."""
    places, slopes = torch.arange(M, dtype=torch.int32).expand(2, M), torch.rand(H)
    first = padded(places, slopes)
    assert padded(places, slopes.clone()) is first
    (term,) = first.bias.terms
    assert isinstance(term, Alibi) and torch.equal(term.slopes, slopes)
    other = padded(places, 2 * slopes)
    assert torch.equal(other.bias.dense(N, M), 2 * first.bias.dense(N, M))
    copied, before = slopes.clone(), first.bias.dense(N, M)
    slopes.mul_(4)
    assert torch.equal(padded(places, copied).bias.dense(N, M), before)
    assert torch.equal(padded(places, slopes).bias.dense(N, M), 2 * other.bias.dense(N, M))


@pytest.mark.parametrize(
    ("slopes", "start"),
    [(torch.nn.Parameter(torch.rand(H)), 0), (torch.rand(H), torch.tensor(1))],
    ids=["parameters", "a place that the device knows"],
)
def test_what_cannot_be_told_is_made_by_each_layer(slopes: Tensor, start: Any) -> None:
    places = torch.arange(M, dtype=torch.int32).expand(2, M)
    first, second = (padded(places, slopes, start) for _ in range(2))
    assert first is not second
    assert torch.equal(first.bias.dense(N, M), second.bias.dense(N, M))


def test_a_tensor_without_memory_has_no_numbers() -> None:
    assert numbers_of(torch.ones(2, device="meta")) is None
    assert numbers_of(torch.ones(2)) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["bloom", "falcon", "falcon without padding"])
def test_a_model_makes_one_term_in_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.recipes.alibi.models import logits, make, padding, patch, tokens

    model, mask = make(name.split()[0]), padding()
    plain = logits(model, tokens(), attention_mask=mask)
    patch(model)
    made: list[object] = []

    def counted(*args: Any) -> ScoreBias:
        made.append(args)
        return ScoreBias(*args)

    monkeypatch.setattr(common_terms, "ScoreBias", counted)
    if name.endswith("without padding"):
        logits(model, tokens())
    else:
        found = logits(model, tokens(), attention_mask=mask)
        torch.testing.assert_close(found[mask.bool()], plain[mask.bool()], rtol=1e-4, atol=1e-5)
    assert len(made) == 1  # for two layers


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

"""The module that holds terms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashbias_convert import Dense, LowRank, Regions, RelativeTable, ScoreBias, modules
from flashbias_convert.mask_memo import MaskMemo
from flashbias_convert.modules import ScoreBiasModule


def make(offset: int = 0) -> ScoreBiasModule:
    at = torch.arange(5)
    term = RelativeTable(table=torch.randn(2, 9), u=at + offset, v=4 - at)
    return ScoreBiasModule(ScoreBias((term,), 2), backend="eager")


def test_codes_outside_the_table_are_refused() -> None:
    """A kernel trusts them: it would read outside the table."""
    make().prepared()
    for offset in (-1, 1):
        with pytest.raises(ValueError, match="the table has 9 entries"):
            make(offset).prepared()


def test_atomics_are_asked_for_by_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy keeps it; a call may say otherwise."""
    asked = []
    monkeypatch.setattr(modules, "flashbias_attention", lambda *_, **k: asked.append(k))
    terms, x = make(), torch.randn(1, 2, 5, 8)
    terms(x, x, x)
    terms.deterministic = False
    copy.deepcopy(terms)(x, x, x)
    terms(x, x, x, deterministic=True)
    assert [k["deterministic"] for k in asked] == [True, False, True]


def test_one_row_of_ids_stands_for_a_mask_that_is_repeated() -> None:
    ids = torch.tensor([[[0, 0, 1], [0, 1, 2]]])  # (1, 2, 3)
    term = Regions(ids=ids)
    mask = term.dense(3, 3).squeeze(-3).expand(4, 2, 3, 3).clone()
    assert MaskMemo().stands_for(term, mask) and MaskMemo().stands_for(term, mask[:1])
    assert MaskMemo().stands_for(Regions(ids=ids.expand(4, 2, 3)), mask)
    mask[3, 1, 0, 1] = 0
    assert not MaskMemo().stands_for(term, mask)


@pytest.mark.parametrize("shape", [(2, 3, 3), (4, 1, 3, 3), (4, 2, 3, 4), (4, 2, 4, 3), (3, 3)])
def test_ids_do_not_stand_for_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    term = Regions(ids=torch.tensor([[[0, 0, 1], [0, 1, 2]]]))
    assert not MaskMemo().stands_for(term, torch.full(shape, -100.0))


# -- calls of some heads -------------------------------------------------------------------


def three_heads(trained: bool = False) -> tuple[ScoreBiasModule, torch.Tensor, torch.Tensor]:
    """The module, and what its dense term and its factors of heads 2 and 0 add, (3, 6, 6)."""
    dense, (phi_q, phi_k) = torch.randn(3, 6, 6), torch.randn(2, 2, 6, 2)
    factors = LowRank(phi_q=phi_q, phi_k=phi_k, heads=(2, 0))
    bias = ScoreBias((Dense(bias=dense), factors), 3)
    thin = ScoreBias((factors,), 3).dense(6, 6)
    return ScoreBiasModule(bias, "sdpa", trained=trained), dense, thin


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("heads", [(0,), (1,), (2,), (2, 0), (0, 1, 2)])
def test_calls_of_some_heads(heads: tuple[int, ...], trained: bool) -> None:
    terms, dense, thin = three_heads(trained)
    q, k, v = torch.randn(3, 4, len(heads), 6, 8).unbind(0)
    extra = torch.randn(4, 1, 6, 6)
    own = list(heads)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = [({}, dense[own] + thin[own])]
    calls += [({"extra": (Dense(bias=extra),)}, dense[own] + thin[own] + extra)]
    if not trained:  # which nothing may leave out
        calls += [({"without": ("low_rank",)}, dense[own])]
        calls += [({"without": ("dense", "low_rank")}, torch.zeros(1, 6, 6))]
    for call, bias in calls:
        found = terms(q, k, v, heads=heads, **call)
        assert torch.allclose(found, attention(q, k, v, bias), atol=1e-5), call


def test_heads_that_do_not_exist() -> None:
    terms, _, _ = three_heads()
    x = torch.randn(4, 1, 6, 8)
    with pytest.raises(ValueError, match="do not exist"):
        terms(x, x, x, heads=(3,))
    with pytest.raises(ValueError, match="for 2 heads, q has 1"):
        terms(x, x, x, heads=(0, 1))


def test_terms_of_a_head_are_kept_until_they_change() -> None:
    terms, dense, thin = three_heads()
    first = terms.prepared(heads=(1,))
    assert terms.prepared(heads=(1,)) is first is not terms.prepared()
    state = {**terms.state_dict(), "dense.bias": 2 * dense}
    terms.load_state_dict(state)
    assert torch.allclose(terms.prepared(heads=(2,)).bias.dense(6, 6), (2 * dense + thin)[2:])
    terms.double()
    assert terms.prepared(heads=(2,)).bias.terms[0].tensors()["bias"].dtype == torch.float64


def test_terms_that_are_built_for_a_head() -> None:
    """They are for the heads of the call, and layers share none that is for all heads."""
    terms = ScoreBiasModule(ScoreBias((), 3), "eager", builders=("dense",))
    q, k, v = torch.randn(3, 4, 1, 6, 8).unbind(0)
    bias = torch.randn(4, 1, 6, 6)
    found = terms(q, k, v, heads=(1,), built={"dense": {"bias": bias}})
    assert torch.allclose(found, attention(q, k, v, bias), atol=1e-5)


def test_terms_of_a_head_that_inference_mode_made_serve_gradients() -> None:
    terms, dense, _ = three_heads()
    q, k, v = torch.randn(3, 4, 1, 6, 8).unbind(0)
    with torch.inference_mode():
        expected = terms(q, k, v, heads=(1,))
    kept = terms.prepared(heads=(1,)).bias.named_tensors()
    assert not any(tensor.is_inference() for _, tensor in kept)  # a kernel saves them
    found = terms(q.requires_grad_(), k, v, heads=(1,))
    assert torch.equal(found, expected)
    (grad,) = torch.autograd.grad(found.sum(), q)
    (wanted,) = torch.autograd.grad(attention(q, k, v, dense[1:2]).sum(), q)
    assert torch.allclose(grad, wanted, atol=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_calls_of_heads_compile_once(prepared: bool) -> None:
    terms, dense, thin = three_heads()
    q, k, v = torch.randn(3, 4, 1, 6, 8).unbind(0)
    if prepared:
        terms.prepare(one_by_one=True)

    def run() -> list[torch.Tensor]:
        return [terms(q, k, v, heads=(head,)) for head in range(3)]

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    first = compiled()
    with torch.compiler.set_stance("fail_on_recompile"):
        again = compiled()
    for found in (first, again, run()):
        for head, out in enumerate(found):
            bias = dense[head] + thin[head]
            assert torch.allclose(out, attention(q, k, v, bias), atol=1e-5)

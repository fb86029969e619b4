"""Biases that take few values: what is a table for pairs, what is not, and when it is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashbias_convert.decompose import added_cost, candidates, decompose, lookup
from flashbias_convert.options import DecomposeOptions
from tests.decompose.conftest import Prices
from tests.graphormer import FARTHEST, N, distances

EXACT = DecomposeOptions(method="exact", force_all=True)


def table(*heads: int, seed: int = 0) -> Tensor:
    return torch.randn(*heads, FARTHEST, generator=torch.Generator().manual_seed(seed))


def graph(*heads: int, seed: int = 0) -> Tensor:
    """A bias of shortest paths, (*heads, N, N)."""
    return table(*heads, seed=seed)[..., distances()[0]]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [(), (5,)])
def test_distances_in_a_graph(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    bias = graph(*batch, 4).to(dtype)
    term = lookup(bias)
    assert term is not None
    term.check_codes()
    assert term.table.dtype == torch.float32 and term.code.shape == (N, N)
    assert term.table.shape == (*batch, 4, len(distances()[0].unique()))
    assert torch.equal(term.dense(N, N).to(dtype), bias)


def test_heads_may_agree_where_others_differ() -> None:
    """An entry is a combination of values: no head alone tells the codes apart."""
    code = distances()[0]
    bias = torch.stack([(code % 2).float(), (code // 2 % 2).float(), (code // 4).float()])
    term = lookup(bias)
    assert term is not None and torch.equal(term.dense(N, N), bias)
    assert term.table.shape[-1] == len(code.unique())


def test_what_is_no_table() -> None:
    bias = graph(4)
    spoiled = bias.clone()
    spoiled[2] = noise(N, N)
    assert lookup(spoiled) is None
    below = bias.clone()  # few values in the rows that are looked at first
    below[:, 16:] = noise(4, N - 16, N)
    assert lookup(below) is None
    assert lookup(bias[:1]) is None  # codes take as many bytes as the numbers of one head
    assert lookup(bias[:2].bfloat16()) is None and lookup(bias[:3].bfloat16()) is not None
    wide = bias.double()
    wide[wide == wide[0, 0, 0]] += 1e-12  # more than fp32 holds
    assert lookup(wide) is None


# -- the choice ----------------------------------------------------------------------------


def test_it_is_taken_where_it_costs_no_more(prices: Prices) -> None:
    bias = graph(4)
    for price, kind in ((4.0, "lookup"), (5.0, "lookup"), (5.1, "dense")):
        prices["lookup"] = price
        found = decompose(bias, EXACT)
        assert {d.term for d in found.decisions} == {kind}
        assert [term.kind for term in found.bias.terms] == [kind]
        assert torch.equal(found.bias.dense(N, N), bias)
        assert all(d.logit_error_max == 0 and d.energy == 1 for d in found.decisions)


def test_committed_costs_decide() -> None:
    lookup_costs, dense_costs = (added_cost(kind, N, N) for kind in ("lookup", "dense"))
    (term,) = decompose(graph(4), EXACT).bias.terms
    assert term.kind == ("lookup" if lookup_costs <= dense_costs else "dense")


def test_a_cost_that_was_not_measured_is_named_as_such(
    prices: Prices, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measured in (False, True):
        monkeypatch.setattr(candidates, "is_measured", lambda *_, known=measured: known)
        reason = decompose(graph(4), EXACT).decisions[0].reason
        assert "values, looked up for each pair, is exact" in reason
        assert ("was not measured" in reason) == (not measured)


def test_other_heads_take_other_terms(prices: Prices) -> None:
    offsets = torch.arange(N)[:, None] - torch.arange(N) + N - 1
    toeplitz = noise(1, 2 * N - 1)[:, offsets]
    prices["relative_table"] = 4
    bias = torch.cat([graph(2), noise(1, N, N), toeplitz, graph(1, seed=5), torch.zeros(1, N, N)])
    found = decompose(bias, EXACT)
    assert [d.term for d in found.decisions] == [
        "lookup", "lookup", "dense", "relative_table", "lookup", "none",
    ]  # fmt: skip
    heads = {term.kind: term.heads for term in found.bias.terms}
    assert heads == {"lookup": (0, 1, 4), "dense": (2,), "relative_table": (3,)}
    assert torch.equal(found.bias.dense(N, N), bias)


def test_auto_weighs_it_against_factors(prices: Prices) -> None:
    options = DecomposeOptions(method="auto", energy=0.5, max_attention_error=1.0)
    prices["lookup"] = 0.5
    found = decompose(graph(4), options)
    assert {d.term for d in found.decisions} == {"lookup"}
    prices["lookup"] = 4.0  # factors of rank 16 cost 1
    assert {d.term for d in decompose(graph(4), options).decisions} == {"low_rank"}

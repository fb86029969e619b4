"""Low rank plus a diagonal: what is recovered, when it is taken, that it is never worse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.decompose import Decomposition, costs, decompose, measure, row_center
from flashbias_convert.decompose import low_rank_diagonal as module
from flashbias_convert.decompose.low_rank_diagonal import (
    best_diagonal,
    truncated_svd_with_diagonal,
)
from flashbias_convert.errors import DecompositionError
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.terms import Diagonal, LowRank
from tests.support import assert_parity
from tests.toy import TOY, ToyModel, make_input, make_model

pytestmark = pytest.mark.usefixtures("prices")
N = 72
EPS32 = torch.finfo(torch.float32).eps


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def smooth(rank: int = 5, heads: int = 1, n: int = N, seed: int = 0) -> torch.Tensor:
    return gaussian(heads, n, rank, seed=seed) @ gaussian(heads, rank, n, seed=seed + 1)


def own(heads: int = 1, n: int = N, size: float = 6.0) -> torch.Tensor:
    """A random value for each token that meets itself."""
    return torch.diag_embed(size * gaussian(heads, n, seed=7))


def kernel(width: float = 8.0) -> torch.Tensor:
    """Nothing exact: a bump of full rank that decays with the distance, and 5 on the diagonal."""
    at = torch.arange(N, dtype=torch.float64)
    return (4 * torch.exp(-(at[:, None] - at).abs() / width) + 5 * torch.eye(N))[None]


def options(**changes: Any) -> DecomposeOptions:
    return DecomposeOptions(**{"method": "svd", "diagonal": True, **changes})


def kinds(found: Decomposition) -> list[str]:
    return [d.term for d in found.decisions]


def check_terms(found: Decomposition, bias: torch.Tensor) -> None:
    """Every decision agrees with the terms: their heads, their ranks and their losses."""
    dense = found.bias.dense(*bias.shape[-2:], dtype=torch.float64)
    loss = measure(bias, dense.expand(bias.shape)).worst_over_batch()
    for h, decision in enumerate(found.decisions):
        for name in ("energy", "logit_error_max", "logit_error_rms", "attention_error"):
            expected = float(getattr(loss, name)[h])
            assert getattr(decision, name) == pytest.approx(expected, abs=1e-9), name
        at_work = [t for t in found.bias.terms if h in (t.heads or range(found.bias.num_heads))]
        assert "+".join(t.kind for t in at_work) == decision.term
        ranks = [t.head_ranks()[(t.heads or range(found.bias.num_heads)).index(h)]
                 for t in at_work if isinstance(t, LowRank)]  # fmt: skip
        assert ranks == ([] if decision.rank is None else [decision.rank])


def rounding_of(found: Decomposition) -> float:
    """How far fp32 factors and values may be off: half a unit each, twice for the product."""
    size = 0.0
    for term in found.bias.terms:
        if isinstance(term, LowRank):
            size += float((term.phi_q.abs() @ term.phi_k.abs().mT).max())
        if isinstance(term, Diagonal):
            size += float(term.values.abs().max())
    return 2 * EPS32 * size


# -- recovery ------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("rank", "size"), [(1, 6.0), (5, 6.0), (5, 0.5), (20, 6.0), (5, 200.0)])
def test_a_sum_of_low_rank_and_diagonal_is_recovered_to_rounding(
    rank: int, size: float, fill: bool
):
    bias = smooth(rank) + own(size=size)
    # a diagonal of 0.5 beside 25 times its energy still needs many columns for six nines
    found = decompose(bias, options(energy=0.999999, fill=fill))
    assert kinds(found) == ["low_rank+diagonal"]
    assert found.decisions[0].rank == rank
    assert found.decisions[0].logit_error_max <= rounding_of(found)
    check_terms(found, bias)
    plain = decompose(bias, options(energy=0.999999, fill=fill, diagonal=False)).decisions[0]
    assert costs.rank_bucket(plain.rank) > costs.rank_bucket(rank)


def test_tokens_with_huge_values_of_their_own_do_not_hide_the_rest():
    """An SVD would call them its first columns; so many, and nothing else would be left to see."""
    bias = smooth(16, n=96)
    spiked = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:24]
    bias[:, spiked, spiked] += 100.0
    found = decompose(bias, options(energy=0.9999))
    assert (kinds(found), found.decisions[0].rank) == (["low_rank+diagonal"], 16)
    assert found.decisions[0].logit_error_max <= rounding_of(found)


def test_a_diagonal_alone_needs_no_factors():
    bias = own(2) + gaussian(2, N, 1)
    found = decompose(bias, options())
    assert kinds(found) == ["diagonal"] * 2
    assert [d.rank for d in found.decisions] == [None, None]
    assert [type(t) for t in found.bias.terms] == [Diagonal]
    # half a unit for the value, and as much for the mean that comes with it
    assert max(d.logit_error_max for d in found.decisions) <= rounding_of(found)
    check_terms(found, bias)


def test_constants_along_rows_change_nothing():
    bias = kernel()
    plain = decompose(bias, options())
    moved = decompose(bias + 100 * gaussian(1, N, 1, seed=3), options())
    assert kinds(plain) == kinds(moved) == ["low_rank+diagonal"]
    assert plain.decisions[0].rank == moved.decisions[0].rank
    values = [f.bias.terms[1].values for f in (plain, moved)]
    assert torch.allclose(*values, atol=1e-4)
    check_terms(moved, bias + 100 * gaussian(1, N, 1, seed=3))


def test_centring_counts_the_mean_that_comes_with_the_diagonal():
    """In a small matrix it matters: a centred unit row is no unit row."""
    bias = smooth(1, n=9) + own(n=9)
    found = truncated_svd_with_diagonal(bias, energy=0.999999, most=[16])
    assert found is not None
    heads, svd = found
    assert (heads, svd.needed) == ([0], (1,))
    error = measure(bias, svd.term, diagonal=svd.diagonal).logit_error_max
    assert svd.diagonal is not None
    size = (svd.term.phi_q.abs() @ svd.term.phi_k.abs().mT).max() + svd.diagonal.abs().max()
    assert float(error) <= 2 * EPS32 * float(size)


def test_causal_rows_are_centred_over_what_they_see():
    visible = torch.ones(N, N).tril().bool()
    bias = smooth(4) + own()
    found = decompose(bias, options(energy=0.999999, fill=False), visible=visible)
    assert kinds(found) == ["low_rank+diagonal"]
    # hidden cells stay part of the matrix, so the row constants that softmax ignores add a rank
    assert found.decisions[0].rank <= 5
    assert found.decisions[0].logit_error_max <= rounding_of(found)


# -- never worse ---------------------------------------------------------------------------


def lost(matrix: torch.Tensor, unit: torch.Tensor, diagonal: torch.Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(matrix - diagonal[..., None] * unit)
    return float(values[..., rank:].square().sum())


@pytest.mark.parametrize("rank", [0, 1, 7, 16, 71, 72])
@pytest.mark.parametrize("name", ["kernel", "noise", "smooth", "own"])
def test_it_loses_no_more_than_the_same_rank_without(name: str, rank: int):
    bias = {"kernel": kernel(), "noise": gaussian(1, N, N), "smooth": smooth(), "own": own()}[name]
    matrix, unit = row_center(bias), row_center(torch.eye(N, dtype=torch.float64))
    zero = torch.zeros(1, N, dtype=torch.float64)
    diagonal, tail = best_diagonal(matrix, unit, rank, (zero,))
    plain = lost(matrix, unit, zero, rank)
    slack = 1e-24 * float(matrix.square().sum())
    assert float(tail) <= plain + slack
    assert float(tail) == pytest.approx(lost(matrix, unit, diagonal, rank), rel=1e-9, abs=slack)
    if name == "kernel" and 0 < rank < 70:
        assert float(tail) < 0.75 * plain


def test_the_best_of_all_steps_and_starts_is_kept():
    """The search goes down and up again; more starts, in any order, can only help."""
    at = torch.rand(300, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = row_center(1 / (torch.cdist(at, at).square() + 1e-3))[None]
    unit = row_center(torch.eye(300, dtype=torch.float64))
    zero = torch.zeros(1, 300, dtype=torch.float64)
    starts = [zero, matrix.diagonal(dim1=-2, dim2=-1)]
    alone = [float(best_diagonal(matrix, unit, 16, [start])[1]) for start in starts]
    assert max(alone) > 1.01 * min(alone)
    for order in (starts, starts[::-1]):
        diagonal, tail = best_diagonal(matrix, unit, 16, order)
        assert float(tail) == min(alone)
        assert lost(matrix, unit, diagonal, 16) == pytest.approx(float(tail), rel=1e-9)


def test_no_small_change_of_the_diagonal_is_better():
    matrix, unit = row_center(kernel()), row_center(torch.eye(N, dtype=torch.float64))
    diagonal, tail = best_diagonal(matrix, unit, 8, (torch.zeros(1, N, dtype=torch.float64),))
    for seed in range(20):
        change = 0.05 * gaussian(1, N, seed=seed)
        assert lost(matrix, unit, diagonal + change, 8) > float(tail)


def test_more_energy_is_kept_in_fewer_columns():
    bias = kernel()
    plain = decompose(bias, options(diagonal=False)).decisions[0]
    found = decompose(bias, options()).decisions[0]
    assert costs.rank_bucket(found.rank) < costs.rank_bucket(plain.rank)
    assert found.energy >= 0.99
    assert f"instead of low_rank of rank {plain.rank}" in found.reason
    least = decompose(bias, options(fill=False)).decisions[0]
    assert least.rank <= found.rank and least.energy >= 0.99


# -- when it is taken ----------------------------------------------------------------------


def mixed() -> torch.Tensor:
    return torch.cat([smooth() + own(), smooth(3), smooth(40), own(), kernel()])


def test_heads_take_it_where_it_saves_columns_and_only_there():
    bias = mixed()
    found = decompose(bias, options())
    both = "low_rank+diagonal"
    assert kinds(found) == [both, "low_rank", "low_rank", "diagonal", both]
    assert [(t.kind, t.heads) for t in found.bias.terms] == [
        ("low_rank", (1, 2)), ("low_rank", (0, 4)), ("diagonal", (0, 3, 4)),
    ]  # fmt: skip
    check_terms(found, bias)


def test_the_option_is_needed():
    bias = mixed()
    off = decompose(bias, options(diagonal=False))
    assert kinds(off) == ["low_rank"] * 5
    assert kinds(decompose(bias, DecomposeOptions(method="svd"))) == ["low_rank"] * 5


def test_auto_takes_it_where_it_costs_less(prices: dict[str | int, float]):
    bias = mixed()
    both, auto = "low_rank+diagonal", options(method="auto")
    found = decompose(bias, auto)
    # a dense bias costs 5; 16 columns 1, 32 columns 2, a diagonal 1
    assert kinds(found) == [both, "low_rank", "dense", "diagonal", both]
    assert "with a diagonal" in found.decisions[0].reason
    assert "2 ps per score; dense: 5 ps; low_rank of rank" in found.decisions[0].reason
    check_terms(found, bias)
    prices["diagonal"] = 4  # as much as dense together with 16 columns
    assert kinds(decompose(bias, auto)) == ["dense", "low_rank", "dense", "diagonal", "dense"]
    prices["diagonal"] = 5
    assert kinds(decompose(bias, auto))[3] == "dense"


@pytest.mark.parametrize("changes", [{"method": "exact"}, {"energy": 1.0}])
def test_exact_terms_stay_exact(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "robust_svd", None)  # must not even be tried
    bias = smooth() + own()
    found = decompose(bias, options(**changes))
    assert torch.equal(found.bias.dense(N, N, dtype=torch.float64), bias)


@pytest.mark.parametrize("method", ["svd", "auto"])
def test_only_square_sites_have_a_diagonal(method: Any):
    bias = (smooth() + own())[..., :-1]
    found, plain = (decompose(bias, options(method=method, diagonal=d)) for d in (True, False))
    assert found.decisions == plain.decisions
    with pytest.raises(ValueError, match="needs square matrices, got 72 x 71"):
        truncated_svd_with_diagonal(bias, energy=0.9, most=[16])


def test_the_cap_holds_with_a_diagonal_too():
    bias = smooth(12) + own()
    for cap, taken in ((13, "low_rank+diagonal"), (11, "dense")):
        found = decompose(bias, options(energy=0.9999, max_rank=cap))
        assert kinds(found) == [taken]
        assert (found.decisions[0].rank or 0) <= cap


def test_a_guard_that_low_rank_fails_may_be_met_with_a_diagonal():
    """Noise of much energy on a few rows, and a diagonal that the other rows live by."""
    bias = 4.0 * torch.eye(64, dtype=torch.float64)[None]
    bias[0, :8] += 60 * gaussian(8, 64)
    plain = decompose(bias, options(diagonal=False))
    assert kinds(plain) == ["dense"] and "attention error" in plain.decisions[0].reason
    found = decompose(bias, options())
    assert kinds(found) == ["low_rank+diagonal"]
    assert found.decisions[0].attention_error <= 0.25
    check_terms(found, bias)


def test_one_decision_holds_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch):
    hard, easy = smooth(5) + own(), smooth(2, seed=4) + own()
    noise = gaussian(1, N, N)  # of which 64 columns keep too little
    bias = torch.stack([torch.cat([hard, hard]), torch.cat([easy, noise])])
    found = decompose(bias, options(energy=0.9999))
    assert kinds(found) == ["low_rank+diagonal", "low_rank"]
    assert found.decisions[0].rank == 5
    assert found.bias.terms[-1].values.shape == (2, 1, N)
    check_terms(found, bias)
    one_by_one = lambda count, *_: (slice(i, i + 1) for i in range(count))  # noqa: E731
    monkeypatch.setattr(module, "chunks", one_by_one)
    again = decompose(bias, options(energy=0.9999))
    assert again.decisions == found.decisions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_precision(dtype: torch.dtype):
    bias = (smooth() + own()).to(dtype)
    found = decompose(bias, options())
    assert kinds(found) == ["low_rank+diagonal"]
    assert all(t.dtype == torch.float32 for _, t in found.bias.named_tensors())
    check_terms(found, bias)


def test_the_same_bias_gives_the_same_bits():
    one, two = (decompose(mixed(), options()) for _ in range(2))
    pairs = zip(one.bias.named_tensors(), two.bias.named_tensors(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def test_an_svd_that_fails_is_an_error_for_svd_and_no_matter_for_auto(
    monkeypatch: pytest.MonkeyPatch,
):
    def never(*_: Any, **__: Any) -> Any:
        raise DecompositionError("did not converge")

    monkeypatch.setattr(module, "robust_svd", never)
    bias = smooth() + own()
    with pytest.raises(DecompositionError, match=r"blocks\.7: did not converge"):
        decompose(bias, options(), name="blocks.7")
    found, without = (
        decompose(bias, options(method="auto", diagonal=diagonal)) for diagonal in (True, False)
    )
    assert found.decisions == without.decisions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_card_decides_like_the_cpu():
    bias = mixed()
    cpu, card = (decompose(b, options()) for b in (bias, bias.cuda()))
    assert kinds(card) == kinds(cpu)
    assert [d.rank for d in card.decisions] == [d.rank for d in cpu.decisions]
    assert all(t.is_cuda for _, t in card.bias.named_tensors())
    expected, found = cpu.bias.dense(N, N), card.bias.dense(N, N).cpu()
    assert torch.allclose(row_center(found), row_center(expected), atol=1e-4)


# -- through a model and a file ------------------------------------------------------------


def diagonal_model() -> ToyModel:
    """The toy with biases of rank 3 plus a diagonal."""
    model = make_model()
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            bias = smooth(3, 2, 36, seed=i) + own(2, 36)
            block["attn"].table.copy_(bias)
    return model


def test_a_patched_model_computes_with_it_and_a_file_keeps_it(tmp_path: Path):
    model, x = diagonal_model(), make_input()
    with torch.no_grad():
        plain, truth = model(x), copy.deepcopy(model).double()(x.double())
        plan = patch_model(model, method="svd", diagonal=True, energy=0.999999, recipes=[TOY])
        ours = model(x)
    assert [d.term for s in plan.sites for d in s.decisions] == ["low_rank+diagonal"] * 6
    assert "low_rank+diagonal in 2 heads (rank 3)" in plan.sites[0].reason
    assert_parity(ours, plain, truth)
    path = tmp_path / "toy.safetensors"
    save_model(model, path, arch=make_model, plan=plan, recipes=[TOY])
    loaded = load_model(path, arch=make_model, recipes=[TOY])
    with torch.no_grad():
        assert torch.equal(loaded(x), ours)


def test_options_without_the_field_are_those_of_before():
    data = DecomposeOptions().to_json()
    assert data.pop("diagonal") is False
    assert DecomposeOptions.from_json(data) == DecomposeOptions()

"""Low rank plus sparse: what is recovered, what is lost, and what can be served."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashbias_convert.attention import flashbias_attention
from flashbias_convert.decompose import measure, row_center
from flashbias_convert.decompose.low_rank_sparse import (
    low_rank_beside_cells,
    low_rank_plus_sparse,
)
from flashbias_convert.errors import DecompositionError, UsageError
from flashbias_convert.terms import ScoreBias

N, RANK = 40, 2
EPS32 = torch.finfo(torch.float32).eps


def mixed(heads: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A row-centred matrix of rank 2 plus large values in 2 % of the cells, and those cells."""
    draw = torch.Generator().manual_seed(seed)
    phi_q, phi_k = torch.randn(2, heads, N, RANK, generator=draw, dtype=torch.float64)
    smooth = row_center(phi_q @ phi_k.mT)
    cells = torch.rand(heads, N, N, generator=draw) < 0.02
    return smooth + 20 * cells, cells


def gravity(n: int = 64) -> tuple[Tensor, Tensor]:
    """Inverse squared distances of random points, and each point's four nearest."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = (x[:, None] - x).square().sum(-1)
    nearest = squares.argsort(-1)[:, :4]
    cells = torch.zeros(n, n, dtype=torch.bool).scatter_(1, nearest, True)
    return (1 / (squares + 0.01))[None], cells


def test_cells_that_are_told_are_kept_exactly() -> None:
    bias, cells = mixed(heads=2)
    # the constant that a row's cells add to its mean is one more column
    found = low_rank_beside_cells(bias, cells, rank=RANK + 1)
    assert torch.equal(found.cells, cells)
    assert (found.values[~cells] == 0).all()
    both = found.low_rank.dense(N, N, dtype=torch.float64) + found.values
    error = (both - row_center(bias))[cells].abs().max()
    assert error <= 2 * EPS32 * bias.abs().max()
    assert torch.equal(found.density, cells.double().mean((-2, -1)))


def test_the_pursuit_finds_the_cells() -> None:
    bias, cells = mixed()
    found = low_rank_plus_sparse(bias, rank=RANK + 1)
    assert found.converged
    assert (found.cells & cells).sum() >= 0.95 * cells.sum()
    assert found.density.item() < 0.25
    assert float(found.loss.energy) > 0.9999
    assert float(found.plain.energy) < 0.9  # the same rank without the cells
    assert float(found.factors_alone.energy) < 0.9


@pytest.mark.parametrize("how", ["pursuit", "nearest"])
def test_losses_are_those_of_the_terms(how: str) -> None:
    bias, cells = gravity()
    found = (
        low_rank_plus_sparse(bias, rank=8, weight=2.0)
        if how == "pursuit"
        else low_rank_beside_cells(bias, cells, rank=8)
    )
    for sparse in ("dense", "lookup"):
        terms = ScoreBias(found.terms(sparse), 1)  # type: ignore[arg-type]
        again = measure(bias, terms.dense(64, 64, dtype=torch.float64))
        for name, value in vars(again).items():
            assert float(value) == pytest.approx(float(getattr(found.loss, name)), abs=1e-6)
    alone = measure(bias, found.low_rank)
    assert torch.equal(alone.energy, found.factors_alone.energy)
    assert float(found.loss.energy) > float(found.plain.energy)
    assert 0 < float(found.density) < 0.5


def test_a_lookup_serves_heads_and_batches_that_keep_other_cells() -> None:
    bias = torch.stack([mixed(heads=2)[0], mixed(heads=2, seed=5)[0]])
    cells = torch.stack([mixed(heads=2)[1], mixed(heads=2, seed=5)[1]])
    found = low_rank_beside_cells(bias, cells, rank=3)
    _, lookup = found.terms("lookup")
    assert torch.equal(lookup.dense(N, N), found.values)
    q = torch.randn(2, 2, N, 8)
    outputs = [
        flashbias_attention(q, q, q, ScoreBias(found.terms(how), 2), backend="eager")  # type: ignore[arg-type]
        for how in ("dense", "lookup")
    ]
    assert torch.equal(*outputs)
    with pytest.raises(UsageError, match="dense"):
        found.terms("csr")  # type: ignore[arg-type]


def test_a_pure_low_rank_keeps_nothing() -> None:
    draw = torch.Generator().manual_seed(2)
    phi_q, phi_k = torch.randn(2, 1, N, 1, generator=draw, dtype=torch.float64)
    found = low_rank_plus_sparse(phi_q @ phi_k.mT, rank=1, weight=10)
    assert found.converged and float(found.density) == 0
    assert 1 - float(found.loss.energy) < (64 * EPS32) ** 2 * N


def test_a_constant_bias_and_a_rank_beyond_the_matrix() -> None:
    found = low_rank_plus_sparse(torch.full((1, 6, 9), 3.0), rank=50)
    assert float(found.density) == 0 and float(found.loss.energy) == 1
    assert found.low_rank.phi_q.shape == (1, 6, 6)


def test_hidden_cells_do_not_count() -> None:
    bias, cells = mixed()
    visible = torch.ones(N, N).tril().bool()
    spoiled = torch.where(visible, bias, torch.full_like(bias, 1.0))
    found = low_rank_beside_cells(spoiled, cells, rank=4, visible=visible)
    both = found.low_rank.dense(N, N, dtype=torch.float64) + found.values
    assert measure(bias, both, visible).energy.item() == pytest.approx(float(found.loss.energy))


def test_what_makes_no_sense_is_refused() -> None:
    bias, cells = mixed()
    with pytest.raises(UsageError, match="rank"):
        low_rank_plus_sparse(bias, rank=0)
    for weight in (0.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="weight"):
            low_rank_plus_sparse(bias, rank=1, weight=weight)
    with pytest.raises(UsageError, match="bool"):
        low_rank_beside_cells(bias, cells.int(), rank=1)
    with pytest.raises(UsageError, match="do not fit"):
        low_rank_beside_cells(bias, cells[..., :3], rank=1)
    bias[0, 1, 2] = math.nan
    with pytest.raises(DecompositionError, match="NaN"):
        low_rank_beside_cells(bias, cells, rank=1)

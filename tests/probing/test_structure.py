"""Forms of a bias that is the same for all inputs, and of one that is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashbias_convert import RelativeTable
from flashbias_convert.probing.dynamic import depends_on, gated_offsets, gated_rows, sum_of_axes
from flashbias_convert.probing.structure import (
    Pattern,
    by_offset,
    is_constant,
    per_key,
    slopes_of,
    symmetric_slopes,
)

EPS = torch.finfo(torch.float32).eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pattern(bias: Tensor, visible: Tensor | None = None) -> Pattern:
    bias = bias.reshape(-1, *bias.shape[-3:])
    return Pattern(bias, visible, 16 * EPS * float(bias.abs().max()))


def test_constant_rows() -> None:
    rows = normal(2, 6, 1).expand(2, 6, 9)
    assert is_constant(pattern(rows))
    spoiled = rows.clone()
    spoiled[1, 3, 4] += 0.1
    assert not is_constant(pattern(spoiled))
    below = torch.ones(6, 9, dtype=torch.bool)
    below[3, 4] = False
    assert is_constant(pattern(spoiled, below))


def test_per_key_up_to_rows() -> None:
    values = normal(2, 9)
    bias = values[:, None, :] + normal(2, 9, 1, seed=1)
    found = per_key(pattern(bias))
    assert found is not None
    rest = found.values[0] - values
    assert float((rest - rest[:, :1]).abs().max()) <= 32 * EPS * float(bias.abs().max())
    hidden = bias.masked_fill(torch.ones(9, 9).triu(1).bool(), 0)
    below = torch.ones(9, 9, dtype=torch.bool).tril()
    assert per_key(pattern(hidden)) is None
    assert per_key(pattern(hidden, below)) is not None
    assert per_key(pattern(normal(2, 9, 9))) is None


def test_no_row_sees_all_keys() -> None:
    sliding = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    bias = normal(2, 1, 9).expand(2, 9, 9)
    assert per_key(pattern(bias, sliding)) is None  # not known, so not claimed


def test_slopes() -> None:
    slopes = torch.tensor([0.5, 0.25])
    alibi = pattern(slopes[:, None, None] * torch.arange(12.0).expand(2, 12, 12))
    found = per_key(alibi)
    assert found is not None
    term = slopes_of(found, alibi)
    assert term is not None and torch.allclose(term.slopes, slopes, rtol=4 * EPS)
    other = per_key(pattern(normal(2, 1, 12).expand(2, 12, 12)))
    assert other is not None and slopes_of(other, alibi) is None


def table_bias(queries: tuple[int, ...], keys: tuple[int, ...], special: int = 0) -> Tensor:
    """A random bias of the offset on grids."""
    spans = [q + k - 1 for q, k in zip(queries, keys, strict=True)]
    table = normal(2, *spans)
    q = torch.cartesian_prod(*(torch.arange(s) for s in queries)).reshape(-1, len(queries))
    k = torch.cartesian_prod(*(torch.arange(s) for s in keys)).reshape(-1, len(keys))
    index = q[:, None] - k + torch.tensor(keys) - 1
    bias = table[(slice(None), *index.unbind(-1))]
    if special:
        whole = torch.cat([normal(2, 1, 1, seed=5).expand(2, 1, bias.shape[-1]), bias], 1)
        return torch.cat([normal(2, 1, 1, seed=6).expand(2, whole.shape[1], 1), whole], 2)
    return bias


@pytest.mark.parametrize(
    ("queries", "keys", "special"),
    [
        ((12,), (12,), 0),
        ((4, 5), (4, 5), 0),
        ((4, 4), (4, 4), 1),
        ((2, 3, 4), (2, 3, 4), 0),
        ((4, 4), (6, 6), 0),
        ((8,), (12,), 0),
    ],
)
def test_offsets(queries: tuple[int, ...], keys: tuple[int, ...], special: int) -> None:
    bias = table_bias(queries, keys, special)
    found = by_offset(pattern(bias))
    assert found is not None
    term, grid = found
    assert isinstance(term, RelativeTable)
    assert (grid.queries, grid.keys, grid.special) == (queries, keys, special)
    assert torch.equal(term.dense(*bias.shape[-2:])[0], bias)
    assert by_offset(pattern(bias + 0.1 * normal(*bias.shape, seed=9))) is None


def test_offsets_behind_a_causal_mask() -> None:
    below = torch.ones(14, 14, dtype=torch.bool).tril()
    bias = torch.where(below, table_bias((14,), (14,)), normal(2, 14, 14, seed=7))
    assert by_offset(pattern(bias)) is None
    found = by_offset(pattern(bias, below))
    assert found is not None
    written = found[0].dense(14, 14)[0]
    assert torch.equal(written.masked_fill(~below, 0), bias.masked_fill(~below, 0))


def test_symmetric_slopes() -> None:
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    slopes = torch.tensor([0.5, 0.125])
    alibi = pattern(-slopes[:, None, None] * distance)
    found = by_offset(alibi)
    assert found is not None
    term = symmetric_slopes(*found, alibi)
    assert term is not None and term.symmetric
    assert torch.allclose(term.slopes, slopes, rtol=8 * EPS)
    bent = pattern(-slopes[:, None, None] * distance.clamp(max=6))
    found = by_offset(bent)
    assert found is not None and symmetric_slopes(*found, bent) is None


# -- different for each input ----------------------------------------------------------------


def test_gated_rows_and_their_offsets() -> None:
    fixed = table_bias((10,), (10,)).double()
    gate = normal(6, 2, 10, 1, seed=2).double().exp()
    rows = gated_rows(gate * fixed, 1e-12)
    assert rows is not None
    found = gated_offsets(rows, 1e-9)
    assert found is not None and found[1].queries == (10,)
    whole = gated_rows(gate * normal(2, 10, 10).double(), 1e-12)
    assert whole is not None and gated_offsets(whole, 1e-9) is None
    assert gated_rows(normal(6, 2, 10, 10).double(), 1e-12) is None
    assert gated_rows((gate * fixed)[:2], 1e-12) is None  # two samples are always multiples in 2-D


@pytest.mark.parametrize("special", [0, 1])
def test_sums_of_axes(special: int) -> None:
    rows, columns = normal(5, 2, 7, 3, 1).double(), normal(5, 2, 7, 1, 4, seed=1).double()
    bias = (rows + columns).flatten(-2)
    if special:
        bias = torch.cat([normal(5, 2, 7, 1, seed=2).double(), bias], -1)
    assert sum_of_axes(bias, 1e-12) == (3, 4, special)
    assert sum_of_axes(normal(5, 2, 7, 12).double(), 1e-12) is None


def test_linear_in_the_query_needs_samples_to_spare() -> None:
    q, k = normal(20, 2, 6, 3), normal(20, 2, 6, 3, seed=1)
    tables = normal(2, 6, 3, 6, seed=2).double()
    of_query = torch.einsum("shnd,hndm->shnm", q.double(), tables)
    of_key = torch.einsum("shmd,hndm->shnm", k.double(), tables)
    assert depends_on(of_query, q, k, 1e-10) == "query"
    assert depends_on(of_query + of_key, q, k, 1e-10) == "query and key"
    assert depends_on(normal(20, 2, 6, 6).double(), q, k, 1e-10) is None
    assert depends_on(of_query[:4], q[:4], k[:4], 1e-10) is None
    assert depends_on(of_query, None, k, 1e-10) is None
    assert math.isfinite(float(of_query.sum()))

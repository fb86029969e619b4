"""A value where a query meets itself."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import Diagonal

from .builders import Maker


def test_values_stand_on_the_diagonal_and_zeros_elsewhere() -> None:
    values = Maker().numbers(2, 3, 4)
    term = Diagonal(values=values)
    dense = term.dense(4, 4)
    assert torch.equal(dense, torch.diag_embed(values)) and term.batch_shape() == (2,)


def test_queries_stand_at_the_last_keys_or_where_they_start() -> None:
    term = Diagonal(values=torch.tensor([[5.0, 6.0]]))
    assert term.dense(2, 3).tolist() == [[[0, 5, 0], [0, 0, 6]]]
    assert term.dense(2, 3, query_start=0).tolist() == [[[5, 0, 0], [0, 6, 0]]]
    assert term.dense(2, 3, query_start=2).tolist() == [[[0, 0, 5], [0, 0, 0]]]


def test_values_stay_fp32() -> None:
    assert Diagonal(values=torch.zeros(1, 2)).to(dtype=torch.float16).values.dtype == torch.float32


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"values must have shape \(\*batch, H, N\)"):
        Diagonal(values=torch.zeros(4))
    with pytest.raises(ValueError, match="diagonal: values is for 4 queries, the call has 3"):
        Diagonal(values=torch.zeros(1, 4)).dense(3, 4)

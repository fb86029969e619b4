"""A bias of the key alone."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import KeyBias

from .builders import Maker


def test_every_query_gets_the_same_row() -> None:
    values = Maker().numbers(2, 3, 5)
    term = KeyBias(values=values)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 4, 5) and term.batch_shape() == (2,)
    for i in range(4):
        assert torch.equal(dense[..., i, :], values)


def test_a_row_scale_makes_rows_differ() -> None:
    """Values times a weight per query: the outer product."""
    values, gate = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, -1.0]])
    dense = KeyBias(values=values, row_scale=gate).dense(2, 3)
    assert dense.tolist() == [[[2.0, 4.0, 6.0], [-1.0, -2.0, -3.0]]]


def test_a_row_scale_brings_its_own_batch_dimensions() -> None:
    x = Maker()
    values, gate = x.numbers(1, 5), x.numbers(2, 3, 4)
    term = KeyBias(values=values, row_scale=gate)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 4, 5)
    assert term.batch_shape() == (2,) and term.num_own_heads() == 3
    assert dense[1, 2, 3, 4] == gate[1, 2, 3] * values[0, 4]


def test_values_stay_fp32() -> None:
    values = torch.tensor([[1 + 2.0**-20]])
    assert torch.equal(KeyBias(values=values).to(dtype=torch.float16).values, values)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"values must have shape \(\*batch, H, M\).*\(4,\)"):
        KeyBias(values=torch.zeros(4))
    with pytest.raises(ValueError, match="key_bias: values is for 4 keys, the call has 5"):
        KeyBias(values=torch.zeros(1, 4)).dense(2, 5)
    gated = KeyBias(values=torch.zeros(1, 4), row_scale=torch.ones(1, 3))
    with pytest.raises(ValueError, match="key_bias: row_scale is for 3 queries, the call has 2"):
        gated.dense(2, 4)

"""The dense term is the bias itself."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import Dense

from .builders import Maker


def test_dense_is_the_tensor_itself() -> None:
    bias = Maker().numbers(2, 3, 4, 5)
    assert torch.equal(Dense(bias=bias).dense(4, 5), bias)
    assert Dense(bias=bias).batch_shape() == (2,)


def test_it_follows_the_dtype_of_its_model() -> None:
    bias = torch.full((1, 2, 2), 1 + 2.0**-20)
    half = Dense(bias=bias).to(dtype=torch.float16)
    assert half.bias.dtype == torch.float16
    assert (half.dense(2, 2) == 1).all() and half.dense(2, 2).dtype == torch.float32


def test_float64_keeps_every_bit() -> None:
    bias = torch.full((1, 2, 2), 1 + 2.0**-40, dtype=torch.float64)
    assert torch.equal(Dense(bias=bias).dense(2, 2, dtype=torch.float64), bias)


def test_a_row_scale_multiplies_rows() -> None:
    x = Maker()
    bias, gate = x.numbers(3, 4, 5), x.numbers(3, 4)
    dense = Dense(bias=bias, row_scale=gate).dense(4, 5)
    for h in range(3):
        for i in range(4):
            assert torch.equal(dense[h, i], gate[h, i] * bias[h, i])


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"bias must have shape \(\*batch, H, N, M\).*\(2, 2\)"):
        Dense(bias=torch.zeros(2, 2))
    term = Dense(bias=torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match="dense: bias is for 3 queries, the call has 4"):
        term.dense(4, 4)
    with pytest.raises(ValueError, match="dense: bias is for 4 keys, the call has 3"):
        term.dense(3, 3)

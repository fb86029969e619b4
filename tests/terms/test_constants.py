"""Small tensors of integers that are made once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashbias_convert import LowRank
from flashbias_convert.terms import constants
from flashbias_convert.terms.constants import columns_past, integers, kept

CPU = torch.device("cpu")


def test_the_same_constant_is_made_once() -> None:
    first = kept(integers, (5, 3), torch.int32, CPU)
    assert first.tolist() == [5, 3] and first.dtype == torch.int32
    assert kept(integers, (5, 3), torch.int32, CPU) is first
    assert kept(integers, (5, 3), torch.int64, CPU).dtype == torch.int64


def test_constants_serve_gradients_after_inference() -> None:
    """The first call that asks for a constant may be one in inference mode."""
    phi = torch.ones(2, 3, 4, requires_grad=True)
    term = LowRank(phi_q=phi, phi_k=torch.ones(2, 3, 4), ranks=(1, 4))
    with torch.inference_mode():
        term.masked_phi_q()
    term.masked_phi_q().sum().backward()
    assert phi.grad is not None
    assert phi.grad.sum((-1, -2)).tolist() == [3.0, 12.0]


def test_nothing_that_is_not_real_is_kept() -> None:
    arguments = ((1, 2, 3), 7, CPU)
    with FakeTensorMode():
        assert isinstance(kept(columns_past, *arguments), FakeTensor)
    own = kept(columns_past, *arguments)
    assert not isinstance(own, FakeTensor)
    with FakeTensorMode():
        assert isinstance(kept(columns_past, *arguments), FakeTensor)
    assert own.sum((-1, -2)).tolist() == [6, 5, 4]


def test_what_a_transform_makes_is_not_kept() -> None:
    """Inside of torch.func.grad even a constant is a shell, without memory that a kernel reads."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        kept(integers, (2, 7), torch.int32, CPU)
        return x * x

    assert torch.func.grad(inside)(torch.tensor(3.0)) == 6
    own = kept(integers, (2, 7), torch.int32, CPU)
    assert own.data_ptr() and own.tolist() == [2, 7]


def test_no_constant_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads the memory of those that were there when it was recorded."""
    monkeypatch.setattr(constants, "MOST", 1)
    monkeypatch.setattr(constants, "_KEPT", {})
    first = kept(integers, (1,), torch.int32, CPU)
    assert kept(integers, (2,), torch.int32, CPU).tolist() == [2]
    assert kept(integers, (1,), torch.int32, CPU) is first

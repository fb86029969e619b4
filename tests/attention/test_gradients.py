"""The sdpa path is differentiable, also through views and stride-0 gradients."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import LowRank
from flashbias_convert.attention import flashbias_attention

from .cases import Inputs


def gradients(backend: str, transposed: bool, stretched: bool) -> list[torch.Tensor]:
    x = Inputs(torch.device("cpu"), torch.float64, n=11, heads=3)
    packed = x.normal(2, 11, 3, 3, 16).double().requires_grad_()
    q, k, v = packed.movedim(-3, 0).transpose(-2, -3).unbind(0)
    phi_q = x.normal(3, 11, 4).double().requires_grad_()
    phi_k = x.normal(3, 11, 4).double().requires_grad_()
    bias = x.bias(LowRank(phi_q=phi_q, phi_k=phi_k), x.table())
    out = flashbias_attention(q, k, v, bias, backend=backend)
    if transposed:
        out = out.transpose(1, 2)
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).expand_as(out) if stretched else None
    (out if weight is None else out * weight).sum().backward()
    return [t.grad for t in (packed, phi_q, phi_k)]  # type: ignore[misc]


@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_equal_the_reference(transposed: bool, stretched: bool) -> None:
    got = gradients("sdpa", transposed, stretched)
    expected = gradients("eager", transposed, stretched)
    for g, e in zip(got, expected, strict=True):
        assert torch.allclose(g, e, atol=1e-10)
    assert all(g.abs().max() > 1e-3 for g in expected)


def test_only_the_factors_need_a_gradient() -> None:
    x = Inputs(torch.device("cpu"), torch.float64, n=11)
    grads = []
    for backend in ("sdpa", "eager"):
        phi_q = torch.full((2, 11, 3), 0.1, dtype=torch.float64, requires_grad=True)
        phi_k = torch.linspace(-1, 1, 66, dtype=torch.float64).reshape(2, 11, 3).requires_grad_()
        bias = x.bias(LowRank(phi_q=phi_q, phi_k=phi_k))
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
        (out**2).sum().backward()
        grads.append((phi_q.grad, phi_k.grad))
    for got, expected in zip(*grads, strict=True):
        assert torch.allclose(got, expected, atol=1e-10)
        assert expected.abs().max() > 1e-3


def test_broadcast_factors_collect_the_gradients_of_the_batch() -> None:
    x = Inputs(torch.device("cpu"), torch.float64, batch=(3,), n=8)
    shared = x.normal(2, 8, 3).double().requires_grad_()
    phi_k = x.normal(2, 8, 3).double()
    out = flashbias_attention(
        x.q, x.k, x.v, x.bias(LowRank(phi_q=shared, phi_k=phi_k)), backend="sdpa"
    )
    (out**2).sum().backward()
    expected = torch.zeros_like(shared)
    for i in range(3):
        own = shared.detach().clone().requires_grad_()
        out = flashbias_attention(
            x.q[i], x.k[i], x.v[i], x.bias(LowRank(phi_q=own, phi_k=phi_k)), backend="eager"
        )
        (out**2).sum().backward()
        expected += own.grad  # type: ignore[operator]
    assert torch.allclose(shared.grad, expected, atol=1e-10)  # type: ignore[arg-type]

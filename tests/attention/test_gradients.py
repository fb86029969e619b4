"""The sdpa path is differentiable, also through views and stride-0 gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch

from flashbias_convert import Dense, LowRank
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


@pytest.mark.parametrize("why", ["key mask", "bias of -inf", "causal"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_rows_that_see_nothing_have_gradients_of_zero(backend: str, why: str) -> None:
    """Zeros came out, whatever q was. Every other row has the gradient that it has alone."""
    x = Inputs(torch.device("cpu"), torch.float64, batch=(1,), n=6)
    values, options, blind = x.dense().bias.double(), {}, [2]
    if why == "key mask":
        options, blind = {"key_mask": torch.zeros(1, 6, dtype=torch.bool)}, [0, 1, 2, 3, 4, 5]
    elif why == "causal":
        options, blind = {"causal": True, "query_start": -2}, [0, 1]
    else:
        values[:, 2] = float("-inf")
    seen = [i for i in range(6) if i not in blind]

    def gradients_of(q: torch.Tensor, bias: torch.Tensor, **call: object) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, x.k, x.v)]
        terms = x.bias(Dense(bias=bias))
        out = flashbias_attention(*leaves, terms, backend=backend, **call)  # type: ignore[arg-type]
        out.square().sum().backward()
        return [t.grad for t in leaves]  # type: ignore[misc]

    dq, dk, dv = gradients_of(x.q, values, **options)
    assert (dq[..., blind, :] == 0).all()
    if not seen:
        assert (dk == 0).all() and (dv == 0).all()
        return
    alone = values[:, seen]
    if why == "causal":
        later = torch.arange(6) > torch.tensor(seen)[:, None] - 2
        alone = alone.masked_fill(later, float("-inf"))
    expected = gradients_of(x.q[..., seen, :], alone)
    for got, wanted in zip((dq[..., seen, :], dk, dv), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-12)
        assert wanted.abs().max() > 1e-3


def test_what_is_saved_for_the_gradient_may_be_kept_elsewhere() -> None:
    """Tensors come back from there with strides of their own."""
    x = Inputs(torch.device("cpu"), batch=(2,), n=5, m=361)
    phi_k, shared = x.normal(1, 361, 3), x.normal(1, 1, 361).expand(1, 5, 361)
    grads = []
    for context in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        packed = torch.stack([x.k, x.v], 2).requires_grad_()
        phi_q = torch.linspace(-1, 1, 15).reshape(1, 5, 3).requires_grad_()
        bias = x.bias(LowRank(phi_q=phi_q, phi_k=phi_k), Dense(bias=shared))
        with context:
            k, v = packed.unbind(2)
            flashbias_attention(x.q, k, v, bias, backend="sdpa").square().sum().backward()
        grads.append((packed.grad, phi_q.grad))
    for got, expected in zip(*grads, strict=True):
        assert torch.equal(got, expected)  # type: ignore[arg-type]
        assert expected.abs().max() > 1e-3  # type: ignore[union-attr]

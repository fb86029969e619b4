"""Gradients of gradients: of what torch computes in single steps, and refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import Dense, LowRank, ScoreBias, flashbias_attention

HEADS, N, SIZE = 2, 9, 16


def low_rank() -> ScoreBias:
    phi_q, phi_k = (torch.randn(HEADS, N, 3, requires_grad=True) for _ in range(2))
    return ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k),), HEADS)


def first_gradient(bias: ScoreBias | None, backend: str) -> tuple[Tensor, Tensor]:
    """q, and the gradient of a function of attention with respect to it, as a graph."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, N, SIZE, requires_grad=True) for _ in range(3))
    out = flashbias_attention(q, k, v, bias, backend=backend)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return q, first


@pytest.mark.parametrize("bias", [None, low_rank()], ids=["no bias", "factors"])
def test_torch_s_fused_attention_says_what_to_do(bias: ScoreBias | None) -> None:
    q, first = first_gradient(bias, "sdpa")
    _, expected = first_gradient(bias, "eager")
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='eager'"):
        torch.autograd.grad(first.sum(), q)


def test_what_is_no_fused_attention_has_them() -> None:
    bias = ScoreBias((Dense(bias=torch.randn(HEADS, N, N, requires_grad=True)),), HEADS)
    found = []
    for backend in ("sdpa", "eager"):
        q, first = first_gradient(bias, backend)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert found[1].abs().max() > 1e-2


class Constant(torch.autograd.Function):
    """Something that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_what_comes_after_attention_may_have_no_gradient(backend: str) -> None:
    x = torch.randn(1, HEADS, N, SIZE, requires_grad=True)
    q = 2 * x
    out = Constant.apply(flashbias_attention(q, q, q, low_rank(), backend=backend))
    (out.sum() + x.sum()).backward()
    assert x.grad is not None and (x.grad == 1).all()


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_of_torch_s_fused_attention_are_those_of_finite_differences(rank: int) -> None:
    torch.manual_seed(2)
    made = [torch.randn(1, HEADS, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    made += [
        torch.randn(HEADS, 3, max(rank, 1), dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]

    def call(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        bias = ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k),), HEADS) if rank else None
        return flashbias_attention(q, k, v, bias, backend="sdpa")

    assert torch.autograd.gradcheck(call, made)


def test_nothing_stays_with_leaves() -> None:
    q, k, v = (torch.randn(1, HEADS, N, SIZE, requires_grad=True) for _ in range(3))
    flashbias_attention(q, k, v, backend="sdpa").sum().backward()
    assert not any(x._backward_hooks for x in (q, k, v))


@pytest.mark.parametrize("rank", [0, 3])
def test_transforms_differentiate_twice(rank: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, 3, 4) for _ in range(3))
    term = LowRank(phi_q=torch.randn(HEADS, 3, rank), phi_k=torch.randn(HEADS, 3, rank))
    bias = ScoreBias((term,), HEADS) if rank else None

    def loss(q: Tensor, backend: str) -> Tensor:
        return flashbias_attention(q, k, v, bias, backend=backend).square().sum()

    found, expected = (torch.func.hessian(loss)(q, name) for name in ("sdpa", "eager"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert expected.abs().max() > 1e-2
    twice = torch.func.grad(lambda q: torch.func.grad(loss)(q, "sdpa").square().sum())(q)
    torch.testing.assert_close(
        twice, 2 * torch.einsum("abcdefgh,efgh->abcd", expected, torch.func.grad(loss)(q, "eager")),
        rtol=1e-3, atol=1e-4,
    )  # fmt: skip

"""Kernels of files that users give to the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from given_kernel import GivenKernel

#: B, H, N, D, R
SHAPE = (2, 3, 7, 4, 5)

#: the formula as attn, and as the published function, whose layout is another
IN_BASE_2 = """
import torch
def attn(q, k, v, pq, pk):
    assert pq.dtype == pk.dtype == torch.float16 and pq.shape[-1] % 16 == 0
    bias = (pq.float() @ pk.float().mT) * torch.log(torch.tensor(2.0))
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
"""
PUBLISHED = """
import torch
def flash_bias_func(q, k, v, q_bias, k_bias, mask, causal, softmax_scale):
    assert mask is None and not causal
    assert q_bias.dtype == k_bias.dtype == torch.float32
    assert q_bias.is_contiguous() and k_bias.is_contiguous()
    q, k, v, pq, pk = (x.transpose(1, 2) for x in (q, k, v, q_bias, k_bias))
    scores = q @ k.mT * softmax_scale + pq @ pk.mT
    return (scores.softmax(-1) @ v).transpose(1, 2)
"""


@pytest.mark.parametrize(("text", "eps"), [(IN_BASE_2, 2**-10), (PUBLISHED, 2**-20)])
def test_both_functions_are_understood(tmp_path: Path, text: str, eps: float) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(text)
    kernel = GivenKernel.of(file)
    assert kernel.name == "theirs"
    b, h, n, d, r = SHAPE
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, n, d) for _ in range(3))
    phi_q = torch.randn(b, h, n, r, requires_grad=True)
    phi_k = torch.randn(b, 1, n, r).expand(b, h, n, r)
    expected = (q @ k.mT * d**-0.5 + phi_q @ phi_k.mT).softmax(-1) @ v
    found = kernel.attend(q, k, v, kernel.factors(phi_q, phi_k, q.dtype))
    # a score is a sum of r products below 4 x 4, each rounded once or twice
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * r * 16 * eps)
    assert (found - expected).abs().max() < (expected - v).abs().max() / 10
    (gradient,) = torch.autograd.grad(found.sum(), phi_q)
    assert gradient.shape == phi_q.shape and gradient.abs().sum() > 0


def test_factors_that_are_trained_have_the_dtype_that_the_published_backward_takes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(PUBLISHED)
    kernel = GivenKernel.of(file)
    phi_q, phi_k = (torch.randn(1, 2, 3, 4) for _ in range(2))
    assert kernel.factors(phi_q, phi_k, torch.bfloat16)[0].dtype == torch.float32
    trained = kernel.factors(phi_q.requires_grad_(), phi_k, torch.bfloat16)
    assert all(phi.dtype == torch.bfloat16 for phi in trained)
    with torch.no_grad():
        assert kernel.factors(phi_q, phi_k, torch.bfloat16)[0].dtype == torch.float32


def test_two_parts_of_short_factors_hold_what_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(PUBLISHED)
    kernel = GivenKernel.of(file)
    phi_q, phi_k = (10 * torch.randn(1, 2, 9, 5, dtype=torch.float64) for _ in range(2))
    truth = phi_q @ phi_k.mT
    errors = []
    for split in (False, True):
        with torch.enable_grad():
            asks = phi_q.clone().requires_grad_()
            found = kernel.factors(asks, phi_k, torch.bfloat16, split=split)
        assert all(phi.dtype == torch.bfloat16 and phi.shape[-1] == 16 for phi in found)
        left, right = (phi.transpose(1, 2).double() for phi in found)
        errors.append(float((left @ right.mT - truth).norm() / truth.norm()))
    # each number has 8 bits in one part, 16 in two, but for the product of both low parts
    assert errors[0] > 2**-10 and errors[1] < 2**-13


@pytest.mark.parametrize("name", ["theirs.py", "theirs.txt"])
def test_what_is_no_kernel_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("def other(): ...\n")
    with pytest.raises(ValueError, match=name):
        GivenKernel.of(file)

"""The gate of the output: out * sigmoid(gate), in every backend."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.attention import flashbias_attention
from tests.support import assert_parity

from .cases import BIASES, Inputs, plain_of, truth_of


@pytest.mark.parametrize("shape", [(2, 3, 33, 16), (3, 1, 16), (1, 33, 1)])
@pytest.mark.parametrize("name", ["none", "low_rank", "heads-differ"])
def test_values(
    name: str, shape: tuple[int, ...], backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Beside plain attention and a product in the same dtype; two draws are judged together."""
    parts = []
    for seed in (0, 1):
        x = Inputs(device, dtype, n=33, m=47, d=24, dv=16, heads=3, seed=seed)
        gate = (4 * x.normal(*shape)).to(dtype)
        bias = BIASES[name](x)
        out = flashbias_attention(x.q, x.k, x.v, bias, gate=gate, backend=backend)
        assert out.dtype == dtype
        truth = truth_of(x, bias, gate=gate.double())
        parts.append((out, plain_of(x, bias, gate=gate), truth))
    assert_parity(*(torch.stack(each) for each in zip(*parts, strict=True)))


def test_the_reference_is_the_formula(device: torch.device) -> None:
    x = Inputs(device, n=9)
    gate = x.normal(*x.q.shape).double()
    plain = truth_of(x, None)
    assert torch.allclose(truth_of(x, None, gate=gate), plain / (1 + (-gate).exp()), atol=1e-12)


def test_layouts_and_extremes(kernel: str, device: torch.device) -> None:
    """A gate as a projection has it, heads behind tokens; shut and open ones are exact."""
    x = Inputs(device, torch.float16, n=70)
    gate = x.normal(2, 70, 2, 16).half().transpose(1, 2)
    gate[..., 0], gate[..., 1] = -1e4, 1e4
    out = flashbias_attention(x.q, x.k, x.v, gate=gate, backend=kernel)
    plain = flashbias_attention(x.q, x.k, x.v, backend=kernel)
    assert (out[..., 0] == 0).all()
    assert torch.equal(out[..., 1], plain[..., 1])
    assert_parity(out, plain * gate.sigmoid(), truth_of(x, None, gate=gate.double()))


def test_infinite_gates_of_single_precision(kernel: str, device: torch.device) -> None:
    """What puts lost bits back must not turn infinities into NaN."""
    x = Inputs(device, n=20)
    gate = x.normal(*x.q.shape)
    gate[..., 0], gate[..., 1] = float("-inf"), float("inf")
    out = flashbias_attention(x.q, x.k, x.v, gate=gate, backend=kernel)
    plain = flashbias_attention(x.q, x.k, x.v, backend=kernel)
    assert (out[..., 0] == 0).all() and torch.equal(out[..., 1], plain[..., 1])


def test_gradients(backend: str, device: torch.device) -> None:
    """Those of the gate and those behind it are the eager ones."""
    found = []
    for way in ("eager", backend):
        x = Inputs(device, n=20)
        gate = x.normal(*x.q.shape)
        leaves = [t.requires_grad_() for t in (x.q, x.v, gate)]
        out = flashbias_attention(x.q, x.k, x.v, gate=gate, backend=way)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for expected, actual in zip(*found, strict=True):
        assert torch.allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("gate", [torch.ones(3, 8, 16), torch.ones(16), torch.ones(5, 2, 9, 16)])
def test_shapes_that_do_not_fit(gate: torch.Tensor) -> None:
    x = Inputs(torch.device("cpu"), n=9)
    with pytest.raises(ValueError, match="gate must have shape"):
        flashbias_attention(x.q, x.k, x.v, gate=gate)


def test_integers_are_no_gate() -> None:
    x = Inputs(torch.device("cpu"), n=9)
    with pytest.raises(TypeError, match="gate must be of floating point"):
        flashbias_attention(x.q, x.k, x.v, gate=torch.ones(2, 9, 16, dtype=torch.int64))

"""Operators at autograd and below it. Stand-ins take the place of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.attention import autograd, backends, flashbias_attention, registration
from flashbias_convert.attention.flags import BOUNDED, CAUSAL, COSINE, DETERMINISTIC, flags_of


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The output is q, read from its memory; all gradients are that of the output.

    Returns:
        Which gradients the last backward pass was asked for.
    """
    asked: list[bool] = []

    def launch(spec: object, tensors: Mapping[str, torch.Tensor], **_: object) -> None:
        assert not any(t.is_neg() for t in tensors.values())
        tensors["o"].copy_(tensors["q"])

    def gradients(saved: object, dout: torch.Tensor, wanted: list[bool]) -> object:
        asked[:] = wanted
        return {n: dout.clone() for n, want in zip("qkv", wanted, strict=False) if want}, []

    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(autograd, "launch", launch)
    monkeypatch.setattr(registration, "launch", launch)
    monkeypatch.setattr(autograd, "attention_gradients", gradients)
    return asked


def attention(q: torch.Tensor) -> torch.Tensor:
    return flashbias_attention(q, q.detach(), q.detach(), backend="triton")


@pytest.fixture
def q() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 5 * 8).reshape(2, 3, 5, 8)


class Names(TorchDispatchMode):
    """Notes which of our operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "flashbias_convert":
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_flags() -> None:
    names = {"causal": CAUSAL, "cosine": COSINE, "bounded": BOUNDED, "deterministic": DETERMINISTIC}
    for chosen in itertools.product([False, True], repeat=4):
        flags = flags_of(**dict(zip(names, chosen, strict=True)))
        assert tuple(bool(flags & bit) for bit in names.values()) == chosen


@pytest.mark.parametrize("trained", [False, True])
def test_modes_see_the_operators(trained: bool, q: torch.Tensor) -> None:
    q.requires_grad_(trained)
    with Names() as names:
        out = attention(q)
        if trained:
            out.sum().backward()
    training = ["attention_training.default", "attention_backward.default"]
    assert names.seen == (training if trained else ["attention.default"])


@pytest.mark.parametrize("trained", [False, True])
def test_a_negated_view_is_resolved(trained: bool, q: torch.Tensor) -> None:
    """Kernels read memory, in which the numbers have the other sign."""
    q.requires_grad_(trained)
    assert torch.equal(attention(torch._neg_view(q)), -q)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_output_may_be_written_to(context: type, q: torch.Tensor) -> None:
    with context():
        out = attention(q)
    assert out.transpose(1, 2).is_contiguous()
    if context is not torch.inference_mode:
        shift = torch.ones((), requires_grad=True)
        out += shift
        out.sum().backward()
        assert shift.grad == q.numel()
    assert not out._is_view()


@pytest.mark.parametrize("asks", ["q", "k", "v", "qv"])
def test_only_those_gradients_that_are_needed_are_made(
    asks: str, q: torch.Tensor, wanted: list[bool]
) -> None:
    given = {name: q.clone().requires_grad_(name in asks) for name in "qkv"}
    flashbias_attention(*given.values(), backend="triton").sum().backward()
    assert wanted == [*(name in asks for name in "qkv"), False]
    assert {name for name, t in given.items() if t.grad is not None} == set(asks)


def test_rows_have_no_gradient(q: torch.Tensor) -> None:
    no_bias = ([], "((None, 0, 0, False, False, 0.0, False, 0, False, False, ()),)")
    out, rows = autograd.attention_training_op(
        q.requires_grad_(), q, q, *no_bias, 1.0, None, None, 0, None, 0
    )
    assert out.requires_grad and not rows.requires_grad


REFUSALS = {
    "inference": "is for inference and has no gradients",
    "second": r"no second derivative.*backend='eager'",
}


@pytest.mark.parametrize(("what", "reason"), REFUSALS.items())
def test_what_has_no_gradient_says_so(what: str, reason: str, q: torch.Tensor) -> None:
    q.requires_grad_()
    if what == "inference":
        no_bias = ([], "((None, 0, 0, False, False, 0.0, False, 0, False, False, ()),)")
        out = registration.attention_op(q, q, q, *no_bias, 1.0, None, None, 0, None, 0)
    else:
        (out,) = torch.autograd.grad(attention(q).square().sum(), q, create_graph=True)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=reason):
        out.sum().backward()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("whose", ["q", "bias"])
def test_forward_derivatives_are_refused(whose: str, trained: bool, q: torch.Tensor) -> None:
    """They would come out as zero."""
    bias = torch.zeros(3, 5, 5)
    other = q.clone().requires_grad_(trained)
    with forward_ad.dual_level():
        same = flashbias_attention(q, q, other, backend="triton")  # nothing has a tangent
        assert torch.equal(same, q) and same.requires_grad == trained
        if whose == "q":
            q = forward_ad.make_dual(q, torch.ones_like(q))
        else:
            bias = forward_ad.make_dual(bias, torch.ones_like(bias))
        terms = ScoreBias((Dense(bias=bias),), 3)
        with pytest.raises(RuntimeError, match="jvp"):
            flashbias_attention(q, q.detach(), other, terms, backend="triton")


def test_a_packed_bias_of_another_version_is_refused(q: torch.Tensor) -> None:
    """As programs that were exported then have it: fields would be taken for others."""
    slopes = torch.ones(q.shape[-3])
    spec = "((None, 0, 0, False, False, 0.0, 0, ('slopes',)),)"
    with pytest.raises(ValueError, match="another version of flashbias_convert: export"):
        registration.attention_op(q, q, q, [slopes], spec, 1.0, None, None, 0, None, 0)

"""A fault of torch's compiler is said where a model is compiled that meets it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import compiler_faults
from flashbias_convert.compiler_faults import CompilerFaultWarning, warn_of_padded_strides


class Windows(nn.Module):
    """Says it in its forward, as if it were on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        warn_of_padded_strides("Windows", torch.device("cuda", 0))
        return x + 1


@pytest.mark.parametrize(
    ("version", "has_it"),
    [("2.11.0+cu130", True), ("2.12.1", True), ("2.14.0", False), ("3.0.0a0", False)],
)
def test_releases(version: str, has_it: bool) -> None:
    assert compiler_faults.mixes_layouts(version) == has_it


def told(monkeypatch: pytest.MonkeyPatch, version: str, pads: bool) -> list[str]:
    """What is said while `Windows` is compiled."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(compiler_faults, "_pads_strides", lambda: pads)
    torch.compiler.reset()
    model = Windows()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.zeros(2))
        assert not seen, "nothing is compiled yet"
        assert torch.equal(
            torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(2)), torch.ones(2)
        )
    return [str(w.message) for w in seen if w.category is CompilerFaultWarning]


def test_it_is_said_while_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = told(monkeypatch, "2.11.0", pads=True)
    assert "comprehensive_padding = False" in message and "Windows" in message


@pytest.mark.parametrize(("version", "pads"), [("2.14.1", True), ("2.11.0", False)])
def test_it_is_not_said_without_need(
    monkeypatch: pytest.MonkeyPatch, version: str, pads: bool
) -> None:
    assert not told(monkeypatch, version, pads)

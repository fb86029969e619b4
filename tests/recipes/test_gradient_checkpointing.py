"""Models that recompute their layers in training, converted: they train through the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recipes import test_decomposed as decomposed
from tests.recipes import test_transformers_distance as distance
from tests.recipes import test_transformers_gates as gates
from tests.recipes import test_transformers_phi4_audio as phi4
from tests.recipes import test_transformers_t5_copies as copies
from tests.recipes.model_parity import Case

CASES: dict[str, Case] = {
    **{name: decomposed.CASES[name] for name in ("sam", "sam_hq", "vitdet", "mvitv2")},
    **{name: gates.CASES[name] for name in ("wavlm padded", "lilt padded")},
    "umt5": distance.CASES["umt5 right"],
    **{f"copy {name}": case for name, case in copies.CASES.items() if "padded" not in name},
    **{f"phi4 {name}": case for name, case in list(phi4.CASES.items())[:1]},
}


def enable(model: Any) -> bool:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    elif getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    else:
        return False
    return any(
        getattr(m, "gradient_checkpointing", False) or getattr(m, "grad_checkpointing", False)
        for m in model.modules()
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_without(name: str) -> None:
    """And what is served afterwards is what was served before."""
    case = CASES[name]
    model = case.make()
    case.patched(model)
    expected, found = case.output(model), []
    for again in (False, True):
        if again and not enable(model):
            pytest.fail(f"{name} does not recompute its layers")
        model.train().zero_grad()
        torch.manual_seed(3)
        case.run(model).square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.eval()
        assert torch.equal(case.output(model), expected)
    assert found[0].keys() == found[1].keys()
    assert any(parameter.endswith(case.bias) for parameter in found[0])
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, rtol=1e-4, atol=1e-6)

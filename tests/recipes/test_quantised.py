"""Projections whose weight is not what they multiply with: they are called, and never read.

For every recipe with a small model among the families.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.errors import NothingToConvertError
from flashbias_convert.verification.outputs import tensors_of
from tests.support import Float64Throughout, assert_parity, nudged

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from whole_models import families

CASES = families.cases(tiny=True)
pytestmark = pytest.mark.filterwarnings("ignore")


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from 1 to 15, 8 for zero, and the scale."""
    scale = (weight.abs().amax() / 7).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scale).round().to(torch.uint8).add(8), scale


class FourBit(nn.Module):
    """Two numbers in a byte, as bitsandbytes leaves a layer: the weight has another shape."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.bias = base.bias
        codes, scale = codes_of(base.weight.detach())
        codes = codes.flatten()
        self.register_buffer("weight", (codes[::2] * 16 + codes[1::2])[:, None])
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.get_buffer("weight")
        codes = torch.cat([packed // 16, packed % 16], 1).view(self.out_features, -1)
        weight = (codes.to(x.dtype) - 8) * self.get_buffer("scale")
        return nn.functional.linear(x, weight, self.bias)


class Rounded(nn.Linear):
    """As layers are while they train to be quantised: the weight that one may read is the other."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        codes, scale = codes_of(base.weight.detach())
        self.register_buffer("used", (codes.to(scale.dtype) - 8) * scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.get_buffer("used"), self.bias)


class Run:
    """A model of a family and its inputs; projections of its attention are quantised."""

    def __init__(self, name: str, kind: type[FourBit | Rounded]) -> None:
        ready = CASES[name].prepare("original", torch.device("cpu"), torch.float32)
        self.model, self.args, self.kwargs = ready.model.eval(), ready.args, ready.kwargs
        self.calls: list[str] = []
        for site in inspect_model(self.model, method="exact", force_all=True).patched:
            for inner, layer in list(self.model.get_submodule(site.name).named_modules()):
                # those of an MLP make a bias, and are no projections
                if isinstance(layer, nn.Linear) and "mlp" not in inner:
                    where = f"{site.name}.{inner}" if site.name else inner
                    made = kind(layer)
                    made.register_forward_hook(lambda *_, at=where: self.calls.append(at))
                    self.model.set_submodule(where, made)

    @torch.no_grad()
    def of(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Its output tensors in a dtype."""
        self.calls.clear()
        args, kwargs = torch.utils._pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x,
            (self.args, self.kwargs),
        )
        found = tensors_of(model(*args, **kwargs))
        return {name: x for name, x in found.items() if x.is_floating_point()}

    def truth(self, model: nn.Module) -> dict[str, Tensor]:
        with Float64Throughout():
            return self.of(copy.deepcopy(model).double(), torch.float64)


@pytest.mark.parametrize("kind", [FourBit, Rounded])
@pytest.mark.parametrize("name", CASES)
def test_quantised_projections_are_called(name: str, kind: Any) -> None:
    """Or the site is refused, or the original itself reads their weights, and what it reads fails.

    Nothing is ever computed with numbers that the original does not compute with.
    """
    run = Run(name, kind)
    model, plain = run.model, copy.deepcopy(run.model)
    try:
        expected, calls = run.of(model), run.calls.copy()
    except (RuntimeError, AssertionError):
        assert kind is FourBit
        patch_model(model, method="exact", force_all=True)
        with pytest.raises((RuntimeError, AssertionError)):
            run.of(model)
        return
    truth = run.truth(plain)
    try:
        plan = patch_model(model, method="exact", force_all=True)
    except NothingToConvertError:
        assert kind is FourBit  # a module that is known by its parts has other parts now
        return
    assert plan.patched and not plan.with_status("failed")
    found = run.of(model)
    assert sorted(run.calls) == sorted(calls)
    assert expected and found.keys() == expected.keys()
    for key, own in expected.items():

        def nearby(draw: int, key: str = key) -> tuple[Tensor, Tensor]:
            twin = nudged(plain, draw)
            return run.of(twin)[key], run.truth(twin)[key]

        assert_parity(found[key], own, truth[key], nearby=nearby)

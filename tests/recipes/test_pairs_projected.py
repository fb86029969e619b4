"""Pairs that the kernel projects in the place of a norm and a linear layer, in real classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    pair_projection,
    patch_model,
)
from flashbias_convert.attention.projection import project_pairs_formula

from .pair_models import (
    in_trunk,
    plain_norms,  # noqa: F401
)


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_pairs_are_projected_by_the_kernel(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and linear layer in one, by its formula here; layers with a hook are asked."""
    model, inputs = in_trunk(package)
    seen: list[Tensor] = []

    def kernel(z: Tensor, *tensors: Any, eps: float, norms: bool, dtype: torch.dtype) -> Tensor:
        assert norms
        seen.append(project_pairs_formula(z, *tensors, eps, norms, dtype))
        return seen[-1]

    with torch.no_grad():
        plain = model(**inputs)
        patch_model(model)
        exact = model(**inputs)
        monkeypatch.setattr(pair_projection, "project_pairs", kernel)
        monkeypatch.setattr(pair_projection, "device_problem", lambda device: None)
        out = model(**inputs)
        assert len(seen) == 1
        for found in (exact, out):
            assert (found - plain).abs().max() < 1e-5 * plain.abs().max()
        for layer in model.modules():
            if isinstance(layer, nn.LayerNorm) or type(layer).__name__.endswith("LayerNorm"):
                layer.register_forward_hook(lambda *_: None)
        assert torch.equal(model(**inputs), exact) and len(seen) == 1


@pytest.mark.parametrize("package", ["boltz1", "boltz2"])
@pytest.mark.parametrize("place", ["before", "after", "forward", "heads"])
def test_boltz_projections_that_are_watched_are_called(
    package: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = in_trunk(package)
    monkeypatch.setattr(pair_projection, "project_pairs", lambda *_, **__: pytest.fail("kernel"))
    monkeypatch.setattr(pair_projection, "device_problem", lambda device: None)
    whole: Any = model[0].proj_z
    if place == "before":
        whole.register_forward_pre_hook(lambda *_: None)
    elif place == "after":
        whole.register_forward_hook(lambda *_: None)
    elif place == "heads":
        whole[2].register_forward_hook(lambda module, given, out: out + 3)
    else:
        whole.forward = lambda z: whole[2](whole[1](whole[0](z))) * 2
    with torch.no_grad():
        plain = model(**inputs)
        patch_model(model)
        assert (model(**inputs) - plain).abs().max() < 1e-5 * plain.abs().max()

"""Steps of training where the model is, under autocast, with terms that are trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIZE = 128


def windows(backend: str) -> nn.Module:
    """Windows of 256, some of them shifted, in heads of 24 and of 48."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "swinv2_tiny_window16_256", img_size=SIZE, embed_dim=48, depths=[2, 1], num_heads=[2, 2],
        num_classes=10, drop_path_rate=0.0,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight")):  # zero: blocks would do nothing
            parameter.data.fill_(1.0)
    patch_model(model, train="terms", method="svd", energy=0.9, force_all=True, backend=backend)
    return model


def gradients(model: nn.Module, images: Tensor) -> Tensor:
    """Of all terms, one after the other."""
    labels = torch.arange(len(images), device=images.device) % 10
    nn.functional.cross_entropy(model.train()(images).float(), labels).backward()
    found = [p.grad for n, p in model.named_parameters() if ".score_bias." in n]
    assert found and all(g is not None for g in found)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_terms(dtype: torch.dtype, device: torch.device) -> None:
    """As close to float64 as those of plain attention in the same dtype."""
    lower = dtype != torch.float32
    if lower and device.type not in ("cpu", "cuda"):
        pytest.skip("no autocast there")
    model = windows("triton" if device.type == "cuda" else "auto").to(device)
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    for made in (plain, truth):
        for module in made.modules():
            if hasattr(module, "backend"):
                module.backend = "eager"
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(device)
    exact = gradients(truth, images.double())
    found = []
    for made in (model, plain):
        with torch.autocast(device.type, dtype, enabled=lower):
            found.append(gradients(made, images))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert float(exact.abs().max()) > 0
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in found]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float32).eps, errors

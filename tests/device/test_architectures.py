"""Every architecture computes on the device what it computes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from flashbias_convert import patch_model
from tests.probing import architectures
from tests.support import assert_parity, nudged

from .models import on, plainly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = (
    "swinv2", "swin", "beit", "mpnet", "mpt", "falcon", "sam", "wavlm", "lilt",
    "swinv2_of_transformers", "swin_of_transformers", "mvit", "pangu", "levit",
    "levit_of_transformers", "efficientformer", "efficientvit",
)  # fmt: skip


def make(name: str) -> tuple[nn.Module, Any]:
    """A model without a classifier: the error of a few logits is too much a matter of chance."""
    model, call = getattr(architectures, name)()
    if hasattr(model, "reset_classifier"):
        model.reset_classifier(0)
    return model, call


@torch.no_grad()
def first_output(model: nn.Module, call: Any) -> Tensor:
    """The first tensor that a model returns."""
    many = call if isinstance(call, tuple) else (call,)
    out: Any = model(**call) if isinstance(call, dict) else model(*many)
    while not isinstance(out, Tensor):
        out = next(iter(out.values() if hasattr(out, "values") else out))
    return out


def moved(device: torch.device, call: Any, dtype: torch.dtype | None = None) -> Any:
    """`on`, for several positional arguments, too."""
    if isinstance(call, tuple):
        return tuple(on(device, value, dtype) for value in call)
    return on(device, call, dtype)


@pytest.mark.parametrize("method", ["exact", "svd"])
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_computes_the_same(name: str, method: str, device: torch.device) -> None:
    model, call = make(name)
    model.to(device)
    plan = patch_model(model, method=method, force_all=True)
    assert {site.status for site in plan.sites} <= {"patched", "left alone"}
    assert {t.device for t in [*model.parameters(), *model.buffers()]} == {device}
    out = first_output(model, moved(device, call))
    assert out.device == device
    # terms are made where the model is: their rounding is that of the device, too
    plain, truth = make(name)[0].to(device), make(name)[0].double()
    if method == "svd":
        plain = plainly(model, device)
        patch_model(truth, method=method, force_all=True, backend="eager")

    def pair(plain: nn.Module, truth: nn.Module) -> tuple[Tensor, Tensor]:
        on_cpu = moved(torch.device("cpu"), call, torch.float64)
        return first_output(plain, moved(device, call)).cpu(), first_output(truth, on_cpu)

    def nearby(number: int) -> tuple[Tensor, Tensor]:
        return pair(nudged(plain, number), nudged(plain, number).cpu().double())

    assert_parity(out.cpu(), *pair(plain, truth), nearby=nearby)

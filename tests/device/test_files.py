"""Files and pages of models on a device, and terms that are trained there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from timm.layers import DropPath

from flashbias_convert import inspect_model, load_model, patch_model, verify_files
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.report import write_page
from tests.checkpoint.models import ARGS, NAME, images, tiny_model, write_tiny
from tests.support import assert_parity

from .models import CASES, outputs, plainly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ARCH = {"arch": f"timm:{NAME}", "arch_args": ARGS}


@pytest.mark.parametrize("method", ["exact", "svd"])
def test_a_checkpoint_is_converted_and_verified(
    device: torch.device, method: str, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "x.safetensors")
    options = DecomposeOptions(method=method, energy=0.9, force_all=True)  # type: ignore[arg-type]
    made = tmp_path / "y.safetensors"
    convert_checkpoint(source, made, options=options, device=device, **ARCH)  # type: ignore[arg-type]
    here = load_model(made, device=device)
    there = load_model(made)
    wide = copy.deepcopy(there).double()
    truth, x = outputs(wide, images(16).double()), images(16).to(device)
    assert_parity(outputs(here, x).cpu(), outputs(plainly(there, device), x).cpu(), truth)
    found = verify_files(source, made, samples=2, batch=2, device=device, **ARCH)  # type: ignore[arg-type]
    assert found.passed and found.device == str(device)


@pytest.mark.parametrize("name", ["toy", "swin"])
def test_a_page_and_figures_are_made(device: torch.device, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashbias_convert.plotting import draw_plan

    case = CASES[name]
    model = case.make().to(device)
    plan = inspect_model(model, recipes=case.recipes, force_all=True, **case.method)
    path = tmp_path / "page.html"
    write_page(path, model, plan, title="x", recipes=case.recipes)
    assert all(site.name in path.read_text() for site in plan.patched)
    drawn, _ = draw_plan(model, plan, tmp_path / "figures", recipes=case.recipes)
    assert drawn and all(figure.stat().st_size for figure in drawn)


def test_terms_are_trained(device: torch.device) -> None:
    """One step: the gradients of the terms are those of a plain computation."""
    found = []
    for place, dtype, backend in (
        (device, torch.float32, "sdpa"), (device, torch.float32, "eager"),
        (torch.device("cpu"), torch.float64, "eager"),
    ):  # fmt: skip
        model = tiny_model()
        patch_model(model, train="terms", method="exact", force_all=True, backend=backend)
        model.to(place, dtype).train()
        for module in model.modules():  # paths are dropped at random
            if isinstance(module, DropPath):
                module.eval()
        named = {n: p for n, p in model.named_parameters() if n.endswith("relative_table.table")}
        assert len(named) == 3 and all(p.device == place for p in named.values())
        loss = model(images().to(place, dtype)).square().sum()
        grads = torch.autograd.grad(loss, list(named.values()))
        found.append(torch.cat([g.flatten() for g in grads]).cpu())
    assert_parity(found[0], found[1], found[2].double())

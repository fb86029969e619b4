"""Hooks below a patched attention: they run as before, or the plan says that they do not.

For every recipe with a small model among the families.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flashbias_convert import inspect_model, patch_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from whole_models import families

CASES = families.cases(tiny=True)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", CASES)
def test_hooks_that_no_longer_run_are_told(name: str) -> None:
    ready = CASES[name].prepare("original", torch.device("cpu"), torch.float32)
    model, seen = ready.model.eval(), set()
    sites = inspect_model(model, method="exact", force_all=True).patched
    assert sites
    for site in sites:
        for child, module in model.get_submodule(site.name).named_children():
            module.register_forward_hook(lambda *_, at=(site.name, child): seen.add(at))
    with torch.no_grad():
        model(*ready.args, **ready.kwargs)
        before = seen.copy()
        seen.clear()
        plan = patch_model(model, method="exact", force_all=True)
        model(*ready.args, **ready.kwargs)
    told = {
        (site.name, child)
        for site in plan.sites
        for warning in site.warnings
        if warning.startswith("hooks on ")
        for child in warning.removeprefix("hooks on ").partition(" do not run")[0].split(", ")
    }
    assert before - seen <= told

"""What runs a model to learn about it: comparing, calibrating, timing, probing, fitting."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    apply_plan,
    benchmark_model,
    calibrate_model,
    fit_sites,
    load_model,
    patch_model,
    probe_model,
    save_model,
    verify_model,
)
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.swap import patched_modules
from tests import pairformer
from tests.support import assert_parity

from .models import CASES, Case, on, outputs, plainly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CPU = torch.device("cpu")
EASY = FitOptions(
    hidden=16, steps=60, learning_rate=2e-2, check_every=20, energy=0.3, max_attention_error=0.5
)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


def pair(case: Case, device: torch.device, **options: Any) -> tuple[Any, Any, Any]:
    """An original, its conversion, and the plan of that."""
    original = case.make().to(device)
    converted = copy.deepcopy(original)
    plan = patch_model(converted, recipes=case.recipes, force_all=True, **options)
    return original, converted, plan


def all_on(model: nn.Module, device: torch.device) -> bool:
    return {t.device for t in [*model.parameters(), *model.buffers()]} == {device}


# -- verification --------------------------------------------------------------------------


@pytest.mark.parametrize("inputs_on_the_cpu", [True, False])
def test_models_are_compared(case: Case, device: torch.device, inputs_on_the_cpu: bool) -> None:
    original, converted, plan = pair(case, device, method="exact")
    call = case.call() if inputs_on_the_cpu else on(device, case.call())
    found = verify_model(original, converted, call, plan=plan)
    assert found.passed and found.device == str(device)
    assert {one.verdict for one in found.sites} == {"within rounding"}
    assert all_on(original, device) and all_on(converted, device)


def test_models_are_compared_on_another_device(device: torch.device) -> None:
    case = CASES["toy"]
    original, converted, plan = pair(case, CPU, method="svd", energy=0.9)
    found = verify_model(original, converted, case.call(), plan=plan, device=device.type)
    assert found.device == device.type
    assert all_on(original, CPU) and all_on(converted, CPU)


# -- calibration ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "swin"])
def test_a_plan_is_calibrated(name: str, device: torch.device) -> None:
    case = CASES[name]
    model, call = case.make().to(device), on(device, case.call())
    reference = outputs(model, call).double()
    plan = calibrate_model(model, call, max_output_error=0.03, recipes=case.recipes)
    assert not patched_modules(model) and all_on(model, device)
    apply_plan(model, plan, recipes=case.recipes)
    change = (outputs(model, call).double() - reference).norm() / reference.norm()
    assert 0 < float(change) <= 0.03 * 1.01
    elsewhere = case.make()
    apply_plan(elsewhere, plan, recipes=case.recipes)
    assert all_on(elsewhere, CPU)


# -- benchmark -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "swin", "bloom"])
def test_models_are_timed(name: str, device: torch.device) -> None:
    if device.type == "card":
        pytest.skip("a device made in Python has no clock and no memory of its own")
    case = CASES[name]
    original, converted, plan = pair(case, device, **case.method)
    report = benchmark_model(
        original, converted, on(device, case.call()), plan=plan, repeats=1, compile=False,
        max_tokens=64,
    )  # fmt: skip
    assert report.device == str(device)
    (entry,) = report.cases
    failed = [row for row in entry.rows if row.status == "failed"]
    assert not failed, failed
    assert {row.verdict for row in entry.rows if row.status == "measured"} <= {
        "within rounding", "approximate", "another function, not compared",
    }  # fmt: skip


# -- probing -------------------------------------------------------------------------------


def test_a_probe_sees_the_same(case: Case, device: torch.device) -> None:
    model = case.make()
    expected = probe_model(model, case.call(), recipes=case.recipes)
    found = probe_model(model.to(device), case.call(), recipes=case.recipes)
    assert expected.sites
    for here, there in zip(found.sites, expected.sites, strict=True):
        assert (here.site, here.kind) == (there.site, there.kind)


# -- fitting -------------------------------------------------------------------------------


def run(model: nn.Module, device: torch.device) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**on(device, pairformer.make_inputs(proteins=2, seed=5)))
    return out


def test_networks_are_fitted(device: torch.device, tmp_path: Path) -> None:
    model = pairformer.make_model().to(device)
    plan = fit_sites(
        model, pairformer.make_inputs(), rank=8, recipes=pairformer.RECIPES,
        tokens_per_step=10, options=EASY, state=tmp_path / "fits",
    )  # fmt: skip
    assert plan.patched, [site.reason for site in plan.sites]
    apply_plan(model, plan, recipes=pairformer.RECIPES)
    assert all_on(model, device)
    truth = copy.deepcopy(model).to("cpu").double()
    with torch.no_grad():
        wide = on(CPU, pairformer.make_inputs(proteins=2, seed=5), torch.float64)
        plain = run(plainly(model, device), device)
        assert_parity(run(model, device).cpu(), plain.cpu(), truth(**wide))
    path = tmp_path / "x.safetensors"
    options: dict[str, Any] = {"arch": pairformer.PairModel, "recipes": pairformer.RECIPES}
    save_model(model, path, **options)
    loaded = load_model(path, device=device, **options)
    assert all_on(loaded, device)
    assert torch.equal(run(loaded, device), run(model, device))


def test_networks_are_fitted_by_what_attention_returns(device: torch.device) -> None:
    model = pairformer.make_model().to(device)
    plan = fit_sites(
        model, pairformer.make_inputs(), rank=8, recipes=pairformer.RECIPES, tokens_per_step=10,
        options=replace(EASY, loss="attention"),
    )  # fmt: skip
    assert len(plan.sites) == 2
    # whether the fit is good enough is no question of the device
    assert all(site.status == "patched" or "energy" in site.reason for site in plan.sites)


@pytest.mark.parametrize("trained_on_the_cpu", [True, False])
def test_networks_are_fitted_elsewhere(device: torch.device, trained_on_the_cpu: bool) -> None:
    place, other = (device, CPU) if trained_on_the_cpu else (CPU, device)
    model = pairformer.make_model().to(place)
    plan = fit_sites(
        model, pairformer.make_inputs(), rank=8, recipes=pairformer.RECIPES, include="pair",
        options=EASY, device=other.type,
    )  # fmt: skip
    apply_plan(model, plan, recipes=pairformer.RECIPES)
    assert patched_modules(model) and all_on(model, place)
    assert run(model, place).isfinite().all()

"""Conversion where the model is: plans, patching and back, files, half precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import (
    apply_plan,
    inspect_model,
    load_model,
    patch_model,
    patched,
    save_model,
    unpatch_model,
)
from flashbias_convert.swap import patched_modules
from tests.support import assert_parity

from .models import CASES, Case, on, outputs, padded, plainly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CPU = torch.device("cpu")


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


def all_on(model: nn.Module, device: torch.device) -> bool:
    return {t.device for t in [*model.parameters(), *model.buffers()]} == {device}


def converted(case: Case, device: torch.device, **options: Any) -> Any:
    model = case.make().to(device)
    patch_model(model, recipes=case.recipes, **{**case.method, "force_all": True, **options})
    return model


def assert_equals_the_cpu(case: Case, model: nn.Module, device: torch.device) -> None:
    """As close to float64 on the CPU as the same terms are by the plainest computation here."""
    assert patched_modules(model) and all_on(model, device)
    plain = outputs(plainly(model, device), on(device, case.call()))
    wide = copy.deepcopy(model).to("cpu").double()
    truth = outputs(wide, on(CPU, case.call(), torch.float64))
    out = outputs(model, on(device, case.call()))
    assert out.device == device
    assert_parity(out.cpu(), plain.cpu(), truth)


# -- planning and patching -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["svd", "exact", "auto"])
def test_a_model_is_planned_and_patched_where_it_is(
    case: Case, device: torch.device, method: str
) -> None:
    model = case.make().to(device)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected = outputs(model, on(device, case.call()))
    plan = inspect_model(model, recipes=case.recipes, method=method, force_all=True)
    assert {site.status for site in plan.sites} <= {"patched", "left alone"} and plan.patched
    apply_plan(model, plan, recipes=case.recipes)
    assert_equals_the_cpu(case, model, device)
    assert unpatch_model(model) == len(plan.patched)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(outputs(model, on(device, case.call())), expected)


def test_a_model_is_patched_for_a_while(case: Case, device: torch.device) -> None:
    model, call = case.make().to(device), on(device, case.call())
    expected = outputs(model, call)
    with patched(model, recipes=case.recipes, method="exact", force_all=True):
        assert patched_modules(model) and all_on(model, device)
        outputs(model, call)
    assert not patched_modules(model)
    assert torch.equal(outputs(model, call), expected)


@pytest.mark.parametrize("planned_on_the_cpu", [True, False])
def test_a_plan_made_on_another_device(
    case: Case, device: torch.device, planned_on_the_cpu: bool
) -> None:
    planned_on, served_on = (CPU, device) if planned_on_the_cpu else (device, CPU)
    plan = inspect_model(
        case.make().to(planned_on), recipes=case.recipes, force_all=True, **case.method
    )
    model = case.make().to(served_on)
    apply_plan(model, plan, recipes=case.recipes)
    assert_equals_the_cpu(case, model, served_on)


def test_a_patched_model_moves(case: Case, device: torch.device) -> None:
    model = converted(case, CPU)
    expected = outputs(model, case.call())
    model.to(device)
    assert_equals_the_cpu(case, model, device)
    assert torch.equal(outputs(model.to("cpu"), case.call()), expected)


# -- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offloads", [False, True])
def test_accelerate_brings_a_model_here(case: Case, device: torch.device, offloads: bool) -> None:
    """It moves tensors one by one, past the modules' own ways.

    What it is compared with has terms from the same device: those that another one computes may
    differ in their last bits.
    """
    accelerate = pytest.importorskip("accelerate")
    if offloads and device.type not in ("cpu", "cuda"):
        pytest.skip("it cannot load parameters of a subclass")
    model = converted(case, CPU)
    expected = converted(case, CPU).to(device)
    model.state_dict()  # has looked at the terms where they are
    whole = sorted({type(site).__name__ for site in patched_modules(model)})
    if offloads:
        made = accelerate.cpu_offload(model, execution_device=device, preload_module_classes=whole)
    else:
        made = accelerate.dispatch_model(model, {"": device}, force_hooks=True)
    call = on(device, case.call())
    for _ in range(2):
        found, wanted = (outputs(m, call).to(CPU) for m in (made, expected))
        assert torch.equal(found, wanted)


def test_a_model_is_saved_and_loaded(case: Case, device: torch.device, tmp_path: Path) -> None:
    model = converted(case, device)
    path = tmp_path / "x.safetensors"
    save_model(model, path, arch=case.arch, recipes=case.recipes)
    factory = case.arch if callable(case.arch) else None
    for place in (device, CPU):
        loaded = load_model(path, arch=factory, recipes=case.recipes, device=place)
        assert all_on(loaded, place)
        mine = copy.deepcopy(model).to(place)
        call = on(place, case.call())
        assert torch.equal(outputs(loaded, call), outputs(mine, call))


# -- half precision ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    """As close to the original in float64 as the original in half precision is."""
    original = case.make().to(dtype)
    call = on(CPU, case.call(), dtype)
    truth = outputs(copy.deepcopy(original).double(), on(CPU, call, torch.float64))
    original.to(device)
    plain = outputs(original, on(device, call))
    patch_model(original, recipes=case.recipes, method="exact", force_all=True)
    out = outputs(original, on(device, call))
    assert out.device == device and out.dtype == dtype
    assert_parity(out.cpu(), plain.cpu(), truth)


@pytest.mark.parametrize("name", ["bloom", "gpt2", "t5"])
def test_generation(name: str, device: torch.device) -> None:
    case = CASES[name]
    left = {"input_ids": case.call()["input_ids"]} if name == "t5" else padded("left")
    call = on(device, left)
    model = case.make().to(device)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**call, **settings)
    patch_model(model, method="exact", force_all=True)
    assert patched_modules(model)
    assert torch.equal(model.generate(**call, **settings), expected)

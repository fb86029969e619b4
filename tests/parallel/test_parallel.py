"""Patched models on two processes, and plans that are made on one, two and three."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashbias_convert import inspect_model
from flashbias_convert.swap import patched_modules
from tests.support import assert_parity

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)
pytest.importorskip("transformers")

from .processes import got_ocr, model_of, outputs, run
from .serving import (
    PACKED,
    SPLIT,
    WRAPPED,
    from_inputs,
    keep,
    models,
    plan_of_transformers,
    serve,
    share,
    terms_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(serve, 2, tmp_path_factory.mktemp("serve"))


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_wrapped_model_serves(served: Found, wrapper: str, name: str) -> None:
    model, x = model_of(name)
    expected = outputs(model, x)
    for found in served:
        outs = found[f"{wrapper} {name}"]
        assert len(outs) == 3  # twice, and after training mode
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("name", SPLIT)
def test_split_heads_compute_the_same(served: Found, name: str) -> None:
    model, x = model_of(name)
    plain = outputs(model, x)
    wide = copy.deepcopy(model).double()
    truth = outputs(wide, x.double() if x.is_floating_point() else x)
    for found in served:
        assert_parity(found[f"split {name}"]["out"], plain, truth)
        assert torch.equal(found[f"split {name}"]["again"], found[f"split {name}"]["out"])


def test_each_process_keeps_its_share_of_the_terms(served: Found) -> None:
    for found in served:
        shapes = found["split bloom"]["terms"]
        assert shapes["alibi.slopes"] == (3,)
        factors = {k: s for k, s in found["split toy"]["terms"].items() if "phi" in k}
        assert factors and all(shape[-3] == 1 for shape in factors.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_split_models_generate_with_padding_and_cache(served: Found, name: str) -> None:
    model: Any
    model, ids = model_of(name)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert expected.shape == (2, 26)
    assert all(torch.equal(found["generated"][name], expected) for found in served)


def test_what_a_split_model_refuses(served: Found) -> None:
    for found in served:
        refusals = found["refusals"]
        assert "split already" in refusals["again"]
        assert "are split over 2 processes" in refusals["unpatch"]
        assert "original forward cannot run" in refusals["train"]
        assert "no module of this model is patched" in refusals["nothing"]
        assert "3 heads of a BiasedAttention cannot be split" in refusals["three"]
        assert "does not say how its heads can be split" in refusals["recipe"]


@pytest.mark.parametrize("name", PACKED)
def test_layers_that_were_split_into_other_rows_are_refused(served: Found, name: str) -> None:
    right = "ColwiseParallel()" if name in ("bloom", "falcon") else "ColwiseFused(3)"
    for found in served:
        for when in ("", ", later"):
            refusal = found["refusals"][f"rows of {name}{when}"]
            assert "was split as if it made" in refusal and f"split it by {right}" in refusal


def test_other_weights_are_noticed_inside_wrappers(served: Found) -> None:
    for found in served:
        stale = dict(found["stale"])
        assert stale.pop("fsdp, the same") == "served"
        assert set(stale.values()) == {"refused"}, stale


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(plan_of_transformers, 2, tmp_path_factory.mktemp("plan"))


def test_a_plan_of_transformers(planned: Found) -> None:
    model, x = model_of("bloom")
    plain, truth = outputs(model, x), outputs(copy.deepcopy(model).double(), x)
    for found in planned:
        assert found["rows"] == 3 * 48 // 2
        assert_parity(found["out"], plain, truth)


def test_a_model_with_a_plan_of_its_own(planned: Found) -> None:
    model: Any
    model, inputs = got_ocr()
    assert len(patched_modules(model)) == 2
    with torch.no_grad():
        plain = model(**inputs).logits
        wide = {**inputs, "pixel_values": inputs["pixel_values"].double()}
        truth = copy.deepcopy(model).double()(**wide).logits
    for found in planned:
        assert found["text rows"] == 32 // 2
        assert_parity(found["seen"], plain, truth)


# -- sites that are shared out -------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    plans = {}
    for name, model, options in models():
        plan = inspect_model(model, **options)
        plans[name] = (plan.to_json(), terms_of(plan))
    return plans | from_inputs()


def test_plans_from_inputs_have_something_to_compare(alone: dict[str, Any]) -> None:
    calibrated, fitted = (alone[name][0]["sites"] for name in ("calibrated", "fitted"))
    chosen = {d["term"] for site in calibrated for d in site["decisions"]}
    assert len(chosen) > 1
    assert [site["status"] for site in fitted] == ["patched", "patched"]
    assert any("phi" in name for name in alone["fitted"][1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_plan_does_not_depend_on_the_processes(
    tmp_path: Path, alone: dict[str, Any], world: int
) -> None:
    for found in run(share, world, tmp_path / "share"):
        for name, (plan, terms) in alone.items():
            their_plan, their_terms = found["plans"][name]
            assert their_plan == plan
            assert their_terms.keys() == terms.keys() and terms
            assert all(torch.equal(their_terms[key], terms[key]) for key in terms)
        assert [s["status"] for s in found["plans"]["toy"][0]["sites"]].count("failed") == 1
        failures = dict(found["failures"])
        assert failures["raises"] == failures["is told"] == "ZeroDivisionError: the second one"
        assert "UsageError: a result of type function cannot be sent" in failures["cannot be sent"]
        assert "ValueError: ('it holds'" in failures["raises what cannot be sent"]
        assert found["numbers"] == [at * at for at in range(7)]
        assert all(0 < done <= total for done, total, _ in found["told"])


def test_terms_that_were_planned_together_wait_where_they_are_kept(tmp_path: Path) -> None:
    for found in run(keep, 2, tmp_path / "keep"):
        assert found["kept"] == len(found["waits"]) > 0
        assert all(found["waits"])

"""Ranks chosen by their effect on outputs: a limit holds, and idle heads get cheap terms."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import apply_plan, load_model, save_model
from flashbias_convert.calibration import CalibrationError, calibrate_model
from flashbias_convert.calibration.alternatives import Form, merged
from flashbias_convert.calibration.search import Alternatives, Search, relative_change
from flashbias_convert.decompose import measure
from flashbias_convert.errors import UsageError
from flashbias_convert.plan import Plan
from flashbias_convert.recipe import Site
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import Dense, Regions, ScoreBias
from tests.toy import TOY, ToyModel, make_input, make_model


def make(seed: int = 0) -> ToyModel:
    """Head 1 of every block writes nothing: its bias cannot matter."""
    model = make_model(seed=seed)
    with torch.no_grad():
        for block in model.blocks:
            block["attn"].qkv.weight[2 * 16 + 8 :] = 0  # type: ignore[index,union-attr]
            block["attn"].qkv.bias[2 * 16 + 8 :] = 0  # type: ignore[index,union-attr]
    return model


def calibrate(model: ToyModel, limit: float, **options: Any) -> Plan:
    return calibrate_model(
        model, make_input(), max_output_error=limit, recipes=[TOY], backend="sdpa", **options
    )


@torch.no_grad()
def change(model: ToyModel, plan: Plan, x: Tensor) -> float:
    reference = model(x).double()
    apply_plan(model, plan, recipes=[TOY], backend="sdpa")
    return relative_change([model(x).double()], [reference])


@pytest.mark.parametrize("limit", [1e-4, 3e-3, 3e-2, 0.3])
def test_the_limit_holds_on_the_inputs(limit: float) -> None:
    model = make()
    plan = calibrate(model, limit)
    assert not patched_modules(model)
    assert plan.options.max_output_error == limit
    assert change(model, plan, make_input()) <= limit * 1.001


@pytest.mark.usefixtures("dear_matrices")
def test_a_looser_limit_costs_less_and_idle_heads_get_nothing() -> None:
    plans = [calibrate(make(), limit) for limit in (1e-4, 3e-2, 0.9)]
    kinds = [[d.term for s in plan.sites for d in s.decisions] for plan in plans]
    assert all(kind == "none" for kind in kinds[0][1::2])  # they write zeros
    assert all(kind == "dense" for kind in kinds[0][::2])
    assert "low_rank" in kinds[1][::2]
    assert set(kinds[2]) == {"none"}
    assert all("calibrated" in site.reason for site in plans[1].sites)


def test_heads_without_a_bias_say_what_they_lose() -> None:
    plan = calibrate(make(), 0.9)
    model = make()
    for site in plan.sites:
        bias = TOY.describe(Site(site.name, model.get_submodule(site.name), model)).bias
        assert bias is not None
        lost = measure(bias.detach(), torch.zeros(()))
        for decision in site.decisions:
            assert decision.term == "none"
            told = [decision.energy, decision.logit_error_rms, decision.attention_error]
            assert told == pytest.approx(
                [
                    float(values[decision.head])
                    for values in (lost.energy, lost.logit_error_rms, lost.attention_error)
                ]
            )
    assert json.dumps(plan.to_json(), allow_nan=False)


def test_inputs_of_a_wrong_size_are_told() -> None:
    with pytest.raises(UsageError, match=r"ToyModel does not run with these inputs: .*Error"):
        calibrate_model(make(), make_input()[..., :5], recipes=[TOY], backend="sdpa")


def test_a_calibrated_model_is_saved_and_loads(tmp_path: Any) -> None:
    model = make()
    plan = calibrate(model, 3e-2)
    apply_plan(model, plan, recipes=[TOY], backend="sdpa")
    save_model(model, tmp_path / "m.safetensors", arch=make, plan=plan, recipes=[TOY])
    loaded = load_model(tmp_path / "m.safetensors", arch=make, recipes=[TOY], backend="sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(make_input()), model(make_input()))


@pytest.mark.usefixtures("dear_matrices")
def test_max_rank_caps() -> None:
    plan = calibrate(make(), 3e-2, max_rank=16)
    assert max(r for s in plan.sites for r in s.ranks()) == 16


@pytest.mark.parametrize("limit", [0.0, -1.0, 1.5, float("nan")])
def test_limits_that_make_no_sense(limit: float) -> None:
    with pytest.raises(UsageError, match="max_output_error"):
        calibrate(make(), limit)


def test_no_inputs() -> None:
    with pytest.raises(UsageError, match="no inputs"):
        calibrate_model(make(), [], recipes=[TOY])


def test_a_split_tensor_is_no_call_and_its_parts_as_a_list_are_calls() -> None:
    pieces = make_input().split(1)
    with pytest.raises(UsageError, match=r"pass list\(pieces\)"):
        calibrate_model(make(), pieces, recipes=[TOY])
    with pytest.raises(UsageError, match="ToyModel does not take these inputs: too many"):
        calibrate_model(make(), tuple(x.clone() for x in pieces), recipes=[TOY])
    plan = calibrate_model(make(), list(pieces), recipes=[TOY], backend="sdpa")
    assert all("calibrated" in site.reason for site in plan.sites)


def form(label: str, cost: float, errors: list[float]) -> Form:
    bias = ScoreBias((Dense(bias=torch.full((2, 4, 4), cost)),), 2)
    return Form(label, bias, cost, (), torch.tensor(errors))


def test_the_search_finds_the_largest_bound_and_stops_where_nothing_holds() -> None:
    plan = calibrate(make(), 0.9)
    site = plan.sites[0]
    forms = [form("none", 0, [0.5, 0.1]), form("rank", 1, [0.2, 0.05]), form("exact", 5, [0, 0])]
    known = Alternatives(site, forms)
    assert [known.choice(x) for x in (0.0, 0.11, 0.6)] == [[2, 2], [2, 0], [0, 0]]
    search = Search([known], lambda allowed: allowed * 2, limit=0.41)
    assert search.run() == pytest.approx(0.2)
    with pytest.raises(CalibrationError, match="even exact terms"):
        Search([known], lambda allowed: 1.0, limit=0.4).run()


def test_forms_are_merged_head_by_head() -> None:
    ids = Regions(ids=torch.tensor([0, 0, 1, 1]))
    forms = [form("a", 1, [0, 0]), form("b", 2, [0, 0])]
    both = merged(forms, [1, 0], (ids,))
    assert torch.equal(both.dense(4, 4)[0, 0, :2], torch.tensor([2.0, 2.0]))
    assert torch.equal(both.dense(4, 4)[1, 0], torch.tensor([1.0, 1.0, -99.0, -99.0]))
    assert [t.heads for t in both.terms] == [(1,), (0,), None]
    same = merged(forms, [1, 1], ())
    assert [t.heads for t in same.terms] == [None]


def test_nan_outputs_never_hold() -> None:
    assert relative_change([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")

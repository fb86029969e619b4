"""Builders with weights of their own: in a site, in a file, and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flashbias_convert import (
    StaleTermsError,
    apply_plan,
    inspect_model,
    load_model,
    save_model,
    unpatch_model,
)
from flashbias_convert.builder_module import BuilderModule
from flashbias_convert.builders import register_builder_module, with_builders
from flashbias_convert.checkpoint.header import PLAN_KEY
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.pair_features import pair_features
from flashbias_convert.plan import Plan
from flashbias_convert.terms import KeyBias, ScoreBias, Term
from tests.pairformer import HEADS, PAIR, RECIPES, SINGLE, PairModel, make_inputs, make_model
from tests.support import assert_parity

FEATURES = {"triangle": 2 * PAIR, "pair": 2 * PAIR + SINGLE}


def networks(features: int, seed: int = 0) -> FactorNetworks:
    """Untrained, but with a bias large enough to matter."""
    made = FactorNetworks(features, features, HEADS, rank=3, hidden=8)
    made.initialise(torch.Generator().manual_seed(seed))
    made.gain.fill_(20)
    return made.requires_grad_(False)


def plan_of(model: nn.Module) -> Plan:
    """A plan with networks that nobody fitted."""
    plan = inspect_model(model, recipes=RECIPES)
    sites = []
    for seed, site in enumerate(plan.sites):
        assert site.status == "left alone" and "flashbias-convert fit" in site.reason
        modules = {"factor_network": networks(FEATURES[site.name], seed)}
        bias = ScoreBias((), HEADS)
        spec = with_builders(bias.spec(), (), modules)
        changes: dict[str, Any] = {"spec": spec, "bias": bias, "modules": modules}
        sites.append(dataclasses.replace(site, status="patched", **changes))
    return dataclasses.replace(plan, sites=sites)


def patched(backend: str = "eager") -> PairModel:
    model = make_model()
    apply_plan(model, plan_of(model), recipes=RECIPES, backend=backend)
    return model


@torch.no_grad()
def run(model: nn.Module, **inputs: Tensor) -> Tensor:
    out: Tensor = model(**(inputs or make_inputs(proteins=2)))
    return out


class Replaced(nn.Module):
    """The original model whose biases are the products of the same networks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.triangle, self.pair = networks(FEATURES["triangle"]), networks(FEATURES["pair"], 1)

    def product(self, made: FactorNetworks, x: Tensor) -> Tensor:
        phi_q, phi_k = made.factors(x, x)
        wide = self.model.pair.out.weight.dtype
        return phi_q.to(wide) @ phi_k.to(wide).mT

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        def masked(scores: Tensor) -> Tensor:
            hidden = ~mask[:, None, None] if scores.dim() == 4 else ~mask[:, None, None, None]
            return scores.masked_fill(hidden, -torch.inf).softmax(-1)

        first, second = self.model.triangle, self.model.pair
        y = first.norm(z)
        q, k, v = first.heads_of(y)
        bias = self.product(self.triangle, pair_features(y, mask=mask)).unsqueeze(1)
        z = z + first.merge(masked(q @ k.mT * 0.5 + bias) @ v)
        q, k, v = second.heads_of(s)
        bias = self.product(self.pair, pair_features(second.norm(z), s, mask))
        out = masked(q @ k.mT * 0.5 + bias) @ v
        return s + second.out(out.transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_patched_model_adds_the_product_of_its_networks(backend: str) -> None:
    inputs = make_inputs(proteins=2)
    counts = inputs["mask"]
    plain = Replaced()
    truth = copy.deepcopy(plain)
    truth.model.double()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    found = run(patched(backend), **inputs)
    assert_parity(found[counts], run(plain, **inputs)[counts], run(truth, **wide)[counts])
    assert (found - run(make_model(), **inputs)).abs().max() > 0.1  # their bias does matter


def test_padding_changes_nothing() -> None:
    model, inputs = patched(), make_inputs(proteins=2)
    counts = inputs["mask"]
    other = {k: t.clone() for k, t in inputs.items()}
    other["z"][~(counts[:, :, None] & counts[:, None, :])] = 5.0
    other["s"][~counts] = -3.0
    assert torch.equal(run(model, **inputs)[counts], run(model, **other)[counts])


# -- files ---------------------------------------------------------------------------------


def saved(tmp_path: Path) -> Path:
    model = make_model()
    plan = plan_of(model)
    apply_plan(model, plan, recipes=RECIPES)
    path = tmp_path / "model.safetensors"
    save_model(model, path, arch=PairModel, plan=plan, recipes=RECIPES)
    return path


def load(path: Path) -> nn.Module:
    return load_model(path, arch=PairModel, recipes=RECIPES, backend="eager")


def test_a_file_keeps_networks(tmp_path: Path) -> None:
    path = saved(tmp_path)
    key = "pair.score_bias.factor_network.phi_k.third.weight"
    assert load_file(path)[key].shape == (HEADS * 3, 8)
    model = load(path)
    assert torch.equal(run(model), run(patched()))
    built = model.get_submodule("pair.score_bias").builder_modules()["factor_network"]
    assert not any(p.requires_grad for p in built.parameters())
    again = tmp_path / "again.safetensors"
    save_model(model, again, arch=PairModel, recipes=RECIPES)
    assert torch.equal(run(load(again)), run(model))


def test_a_state_dict_alone_keeps_networks(tmp_path: Path) -> None:
    torch.save(patched().state_dict(), tmp_path / "state.pt")
    assert torch.equal(run(load(tmp_path / "state.pt")), run(patched()))


def change_plan(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file with an entry of its first site changed."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    plan = json.loads(header[PLAN_KEY])
    change(plan["sites"][0]["spec"]["builder_modules"][0])
    save_file(load_file(path), path, metadata={**header, PLAN_KEY: json.dumps(plan)})


def set_hidden(entry: dict[str, Any]) -> None:
    entry["config"]["hidden"] = 10**8


def set_kind(entry: dict[str, Any]) -> None:
    entry["kind"] = "os.system"


def lose_config(entry: dict[str, Any]) -> None:
    del entry["config"]


def set_shape(entry: dict[str, Any]) -> None:
    entry["config"]["hidden"] = 9


@pytest.mark.parametrize("change", [set_hidden, set_kind, lose_config, set_shape])
def test_plans_that_lie_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = saved(tmp_path)
    change_plan(path, change)
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


@pytest.mark.parametrize("damage", ["missing", "nan", "shape", "layout"])
def test_damaged_networks_are_refused(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path)
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    key = "triangle.score_bias.factor_network.phi_q.second.weight"
    if damage == "missing":
        del tensors[key]
    elif damage == "nan":
        tensors[key][0, 0] = torch.nan
    elif damage == "shape":
        tensors[key] = tensors[key][:4].clone()
    else:
        text = tensors["triangle.score_bias.layout"]
        tensors["triangle.score_bias.layout"] = text.flip(0)
    save_file(tensors, path, metadata=header)
    with pytest.raises((CheckpointError, ValueError)):
        load(path)


def test_networks_of_other_sizes_are_not_read_as_these() -> None:
    model = make_model()
    plan = plan_of(model)
    other = FactorNetworks(FEATURES["pair"], FEATURES["pair"], HEADS, rank=6, hidden=8)
    spec = with_builders(ScoreBias((), HEADS).spec(), (), {"factor_network": other})
    sites = [dataclasses.replace(s, spec=spec if s.name == "pair" else s.spec) for s in plan.sites]
    apply_plan(model, dataclasses.replace(plan, sites=sites), recipes=RECIPES, empty=True)
    with pytest.raises(ValueError, match="belong to other terms"):
        model.load_state_dict(patched().state_dict())


def test_a_plan_from_a_file_holds_no_networks() -> None:
    model = make_model()
    plan = Plan.from_json(json.loads(json.dumps(plan_of(model).to_json())))
    assert plan.sites[0].builder_modules() == ("factor_network",)
    with pytest.raises(UsageError, match="holds no terms"):
        apply_plan(model, plan, recipes=RECIPES)
    apply_plan(model, plan, recipes=RECIPES, empty=True, backend="eager")
    with pytest.raises(StaleTermsError, match="have not been loaded"):
        run(model)
    model.load_state_dict(patched().state_dict())
    assert torch.equal(run(model), run(patched()))


# -- life in a model -----------------------------------------------------------------------


def test_casts_move_networks_and_leave_their_dtype() -> None:
    model = patched().to(torch.bfloat16)
    site = model.get_submodule("pair.score_bias.factor_network")
    assert {t.dtype for t in site.state_dict().values()} == {torch.float32}
    expected = patched().get_submodule("pair.score_bias.factor_network").state_dict()
    assert all(torch.equal(t, expected[k]) for k, t in site.state_dict().items())
    inputs = {
        k: t.bfloat16() if t.is_floating_point() else t for k, t in make_inputs(proteins=2).items()
    }
    assert run(model, **inputs).dtype == torch.bfloat16
    assert model.to("meta").pair.score_bias.factor_network.gain.is_meta


def test_copies_and_unpatching() -> None:
    model = patched()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(copied), run(model))
    assert unpatch_model(model) == 2
    assert torch.equal(run(model), run(make_model()))
    assert not any("score_bias" in key for key in model.state_dict())


def test_weights_that_make_the_bias_may_not_change_unnoticed() -> None:
    model = patched()
    with torch.no_grad():
        model.pair.pair_bias.weight.mul_(2)
    with pytest.raises(StaleTermsError):
        run(model)


def test_gradients_reach_the_input() -> None:
    model, inputs = patched(), make_inputs(proteins=2)
    s = inputs["s"].requires_grad_()
    model(**inputs).square().sum().backward()
    assert s.grad is not None and s.grad.isfinite().all() and s.grad.abs().max() > 0


class KeyNetwork(BuilderModule):
    """A builder of somebody else's."""

    kind = "key_network"

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2))

    def config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: Any) -> KeyNetwork:
        return cls()

    def make(self, *, x: Tensor) -> Term:  # type: ignore[override]
        return KeyBias(values=self.slope[:, None] * x)


def test_recipes_may_bring_their_own() -> None:
    register_builder_module(KeyNetwork)
    register_builder_module(KeyNetwork)  # again: harmless
    terms = ScoreBiasModule(ScoreBias((), 2), "eager", modules={"mine": KeyNetwork()})
    assert terms.spec()["builder_modules"][0]["kind"] == "key_network"
    q = torch.randn(1, 2, 5, 4)
    x = torch.randn(5)
    with torch.no_grad():
        out = terms(q, q, q, built={"mine": {"x": x}})
    expected = (q @ q.mT * 4**-0.5 + x).softmax(-1) @ q
    torch.testing.assert_close(out, expected)
    for kind in ("low_rank", "layout", "axial_rows", "a.b", "factor_network"):
        with pytest.raises(ValueError, match="cannot be called"):
            register_builder_module(type("Other", (KeyNetwork,), {"kind": kind}))
    with pytest.raises(ValueError, match="cannot be called"):
        ScoreBiasModule(ScoreBias((), 2), modules={"layout": KeyNetwork()})


def test_features_of_a_pair_representation() -> None:
    pair, single = torch.randn(2, 5, 5, 3), torch.randn(2, 5, 4)
    found = pair_features(pair, single, diagonal=True)
    parts = found.split([3, 3, 3, 4], -1)
    diagonal = torch.stack([pair[:, i, i] for i in range(5)], 1)
    expected = (pair.mean(2), pair.mean(1), diagonal, single)
    for part, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, wanted)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    seen = pair_features(pair, mask=mask)[1][mask[1]]
    kept = pair[1][mask[1]][:, mask[1]]
    torch.testing.assert_close(seen, torch.cat([kept.mean(1), kept.mean(0)], -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_in_half_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Sums pass what half precision holds, in size and in digits; padding counts for nothing."""
    pair = torch.full((2000, 40, 1), 60.0, dtype=dtype)[:, :, None, 0].expand(-1, -1, 2)
    pair = torch.cat([pair.transpose(0, 1), torch.full((40, 8, 2), 9.0, dtype=dtype)], 1)
    square = pair.new_full((2008, 2008, 2), 7.0)
    square[:40] = pair
    mask = torch.arange(2008) < 2000
    for found in (pair_features(square)[:40, :2], pair_features(square, mask=mask)[:40, :2]):
        assert found.dtype == torch.float32 and found.isfinite().all()
    torch.testing.assert_close(found, torch.full((40, 2), 60.0))

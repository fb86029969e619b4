"""The whole way: inputs through a model, networks fitted, patched, saved and loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import apply_plan, fit_sites, load_model, patch_model, save_model
from flashbias_convert.decompose.neural import Check
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite
from flashbias_convert.errors import NothingToConvertError, UsageError
from flashbias_convert.fitting import site_fit
from flashbias_convert.fitting.collect import Collected, ObservationError, collect, cropped
from flashbias_convert.fitting.sites import missed
from flashbias_convert.inputs import Batch, as_inputs
from flashbias_convert.plan import Plan
from flashbias_convert.recipe import Observed
from flashbias_convert.swap import patched_modules
from tests.pairformer import (
    HEADS,
    PAIR_BIAS,
    RECIPES,
    TRIANGLE,
    PairModel,
    make_inputs,
    make_model,
    observe_pair,
    observe_triangle,
)
from tests.toy import TOY
from tests.toy import make_input as toy_input
from tests.toy import make_model as toy_model

#: easily reached: these tests are about the way, not about the goal
EASY = FitOptions(
    hidden=16,
    steps=60,
    learning_rate=2e-2,
    check_every=20,
    energy=0.3,
    max_attention_error=0.5,
)
HARD = dataclasses.replace(EASY, energy=0.99999)


def fit(options: FitOptions = EASY, **changes: Any) -> tuple[PairModel, Plan]:
    model = make_model()
    given: dict[str, Any] = {"rank": 8, "recipes": RECIPES, "include": "pair"}
    return model, fit_sites(model, make_inputs(), options=options, **{**given, **changes})


def run(model: nn.Module, seed: int = 5) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**make_inputs(proteins=2, seed=seed))
    return out


@pytest.mark.usefixtures("dear_matrices")
def test_a_fitted_model_is_nearer_to_the_original_than_one_without_bias(tmp_path: Path) -> None:
    model, plan = fit(include=())
    assert not patched_modules(model) and torch.equal(run(model), run(make_model()))
    assert [site.status for site in plan.sites] == ["patched", "patched"]
    site = plan.sites[1]
    assert "factor networks of rank 8: reached after" in site.reason
    assert "held out" in site.reason and not site.warnings
    assert (site.n, site.m, site.heads) == (20, 20, HEADS)
    assert [d.term for d in site.decisions] == ["factor_network"] * HEADS
    assert all(0.3 <= d.energy < 1 and 0 < d.attention_error <= 0.5 for d in site.decisions)
    assert not site.is_exact()

    original = run(model)
    apply_plan(model, plan, recipes=RECIPES, backend="eager")
    found = run(model)  # on proteins that no fit has seen
    without = make_model()
    for module in (without.triangle, without.pair):
        nn.init.zeros_(module.pair_bias.weight)
    assert (found - original).square().mean() < (run(without) - original).square().mean()

    path = tmp_path / "m.safetensors"
    save_model(model, path, arch=PairModel, plan=plan, recipes=RECIPES)
    loaded = load_model(path, arch=PairModel, recipes=RECIPES, backend="eager")
    assert torch.equal(run(loaded), found)


def test_a_fit_that_misses_leaves_its_site_alone() -> None:
    model, plan = fit(HARD)
    by_name = {site.name: site for site in plan.sites}
    assert by_name["triangle"].reason == "not among the included sites"
    site = by_name["pair"]
    assert site.status == "left alone" and missed(plan) == [site]
    assert "did not reach" in site.reason and "instead of 99.9990%" in site.reason
    assert site.spec is None and site.modules is None
    assert not site.decisions and site.gain is None  # its reason tells what was reached
    apply_plan(model, plan, recipes=RECIPES)
    assert not patched_modules(model)


def test_the_model_and_its_gradients_stay_as_they_were() -> None:
    model = make_model()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    random = torch.random.get_rng_state()
    fit_sites(model, make_inputs(), rank=4, options=EASY, recipes=RECIPES, include="pair")
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_a_patched_model_is_fitted_anew_from_its_original() -> None:
    model, plan = fit()
    apply_plan(model, plan, recipes=RECIPES)
    again = fit_sites(model, make_inputs(), rank=8, options=EASY, recipes=RECIPES, include="pair")
    assert len(patched_modules(model)) == 1
    assert again.sites[1].decisions == plan.sites[1].decisions


@pytest.mark.usefixtures("dear_matrices")
def test_one_input_is_both_trained_on_and_judged_and_that_is_said() -> None:
    inputs = {k: t[:1] for k, t in make_inputs().items()}
    plan = fit_sites(make_model(), inputs, rank=4, options=EASY, recipes=RECIPES, include="pair")
    assert "the inputs that it was trained on" in plan.sites[1].reason
    assert "one input" in plan.sites[1].warnings[-1]


def test_attention_outputs_can_be_fitted() -> None:
    options = dataclasses.replace(EASY, loss="attention", energy=None, max_attention_error=0.9)
    _, plan = fit(options, include=())
    assert [site.status for site in plan.sites] == ["patched", "patched"]


def test_an_interrupted_fit_goes_on(tmp_path: Path) -> None:
    def interrupt(name: str, check: Check) -> None:
        if check.step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(HARD, state=tmp_path / "fits", progress=interrupt)
    steps: list[int] = []
    _, plan = fit(HARD, state=tmp_path / "fits", progress=lambda n, c: steps.append(c.step))
    assert steps == [40, 60]
    assert plan.sites[1].decisions == fit(HARD)[1].sites[1].decisions


def test_a_state_is_that_of_its_data_and_of_no_other(tmp_path: Path) -> None:
    """Also where the inputs that judge are the same: the last of eight."""
    fit(state=tmp_path / "fits")
    given = {"rank": 8, "recipes": RECIPES, "include": "pair", "options": EASY}
    inputs = make_inputs()
    assert len(inputs["s"]) >= 2
    inputs["s"] = inputs["s"].clone()
    inputs["s"][0] *= 1.01
    with pytest.raises(UsageError, match="another fit"):
        fit_sites(make_model(), inputs, state=tmp_path / "fits", **given)
    assert fit(state=tmp_path / "fits")[1].sites[1].decisions


def test_nan_in_the_inputs_fails_that_site_alone() -> None:
    inputs = make_inputs()
    inputs["s"][0, 0, 0] = torch.nan  # the triangle does not see it
    plan = fit_sites(make_model(), inputs, rank=4, options=EASY, recipes=RECIPES)
    assert plan.sites[0].status == "patched"
    assert plan.sites[1].status == "failed" and "NaN" in plan.sites[1].reason


def test_a_recipe_that_does_not_say_what_a_fit_needs() -> None:
    bare = dataclasses.replace(PAIR_BIAS, observe=None)
    _, plan = fit(recipes=(TRIANGLE, bare))
    assert plan.sites[1].status == "unsupported"
    assert "does not say what a fit needs" in plan.sites[1].reason


def test_a_site_that_never_runs() -> None:
    model = make_model()
    model.forward = lambda s, z, mask: model.triangle(z, mask)  # type: ignore[method-assign]
    plan = fit_sites(model, make_inputs(), rank=4, options=EASY, recipes=RECIPES, include="pair")
    assert plan.sites[1].status == "left alone" and "did not run" in plan.sites[1].reason


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="evaluation mode"):
        fit_sites(make_model().train(), make_inputs(), recipes=RECIPES)
    with pytest.raises(UsageError, match="no inputs"):
        fit_sites(make_model(), [], recipes=RECIPES)
    with pytest.raises(UsageError, match="rank"):
        fit(rank=0)
    with pytest.raises(NothingToConvertError, match="depends on the input"):
        fit_sites(toy_model(), toy_input(), recipes=[TOY])


def test_patching_without_a_fit_leaves_such_sites_alone() -> None:
    model = make_model()
    plan = patch_model(model, recipes=RECIPES, force_all=True)
    assert plan.counts() == {"left alone": 2} and not patched_modules(model)


# -- samples -------------------------------------------------------------------------------


def samples_of(name: str, observe: Any, **options: Any) -> Collected:
    model = make_model()
    batches = list(as_inputs(make_inputs(proteins=3)).batches)
    given: dict[str, Any] = {"most": 10, "attention": True, **options}
    return collect(model, model.get_submodule(name), observe, batches, **given)


@torch.no_grad()
@pytest.mark.parametrize("name", ["triangle", "pair"])
def test_samples_are_what_the_site_saw_without_padding(name: str) -> None:
    observe = {"triangle": observe_triangle, "pair": observe_pair}[name]
    found = samples_of(name, observe)
    assert found.origins == [(0, 0), (0, 1), (0, 2)]
    assert [sample.bias.shape[-1] for sample in found.samples] == [20, 20, 17]
    model, inputs = make_model(), make_inputs(proteins=3)
    if name == "pair":
        inputs["z"] = inputs["z"] + model.triangle(inputs["z"], inputs["mask"])
        seen = observe(model.pair, **inputs)
    else:
        del inputs["s"]
        seen = observe(model.triangle, **inputs)
    last = found.samples[-1]
    assert torch.equal(last.bias, seen.bias[-1].reshape(HEADS, 20, 20)[:, :17, :17])
    assert torch.equal(last.x_q, seen.x_q[-1].reshape(20, -1)[:17])
    assert last.q is not None and last.q.shape == (4 if name == "triangle" else 1, HEADS, 17, 4)
    rows = seen.q[-1][::5] if name == "triangle" else seen.q[-1:]
    assert torch.equal(last.q, rows[..., :17, :])


def test_only_so_many_samples_are_kept_and_by_chance() -> None:
    found = samples_of("pair", observe_pair, most=2, attention=False)
    assert found.seen == 3 and len(found.samples) == 2
    assert found.samples[0].q is None


def test_inputs_judge_or_train_but_not_both() -> None:
    found = Collected(most=100, attention=False)
    sample = samples_of("pair", observe_pair).samples[0]
    for call in range(2):  # two calls of the site per input, such as a recycling model makes
        for number in range(20):
            found.add(dataclasses.replace(sample, scale=float(call)), (number, 0))
    train, judges, apart = found.split()
    assert apart and len(train) == 36 and len(judges) == 4


def test_a_crop_takes_the_same_tokens_everywhere() -> None:
    sample = samples_of("pair", observe_pair).samples[0]
    tagged = torch.arange(20.0)
    sample = dataclasses.replace(
        sample,
        x_q=tagged[:, None],
        x_k=tagged[:, None],
        bias=(100 * tagged[:, None] + tagged).expand(HEADS, 20, 20),
    )
    crop = cropped([sample], 7)(torch.Generator().manual_seed(0))
    assert crop.bias.shape == (HEADS, 7, 7) and len(crop.x_q.unique()) == 7
    assert torch.equal(crop.bias[0], 100 * crop.x_q + crop.x_k.T)
    assert crop.q is not None and crop.v is not None and crop.q.shape[-2] == crop.v.shape[-2] == 7
    assert cropped([sample], 50)(torch.Generator()).bias.shape == (HEADS, 20, 20)


def test_features_and_biases_must_have_the_same_batch() -> None:
    x, bias = torch.randn(5, 3), torch.randn(2, 1, 5, 5)
    model = make_model()
    batch = Batch(kwargs=make_inputs(proteins=1))
    with pytest.raises(ObservationError, match="batch dimensions"):
        collect(
            model, model.pair, lambda *a, **k: Observed(x, x, bias), [batch], most=1,
            attention=False,
        )  # fmt: skip


def test_inputs_that_the_model_does_not_run_with() -> None:
    given = {name: tensor[..., :-1] for name, tensor in make_inputs().items()}
    with pytest.raises(UsageError, match="PairModel does not run with these inputs: RuntimeError"):
        fit_sites(make_model(), given, options=EASY, rank=8, recipes=RECIPES, include="pair")


def test_networks_that_cost_more_than_the_bias_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def judged(n: int, m: int, rank: int, site: PairSite) -> str | None:
        asked.append((n, m, rank, site))
        return "too dear" if rank > 4 else None

    monkeypatch.setattr(site_fit, "networks_in_words", judged)
    for rank in (4, 5):
        _, plan = fit(dataclasses.replace(EASY, steps=20, energy=None), rank=rank)
        (site,) = plan.patched
        assert asked[-1] == (site.n, site.m, rank, PairSite(HEADS, site.head_dim)) and site.n > 0
        assert ("too dear" in site.warnings) == (rank == 5)

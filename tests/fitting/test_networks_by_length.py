"""Fitted networks serve the lengths where they are faster; shorter calls keep their bias."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    apply_plan,
    factors_once,
    fit_sites,
    load_model,
    patch_model,
    save_model,
)
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite
from flashbias_convert.errors import UsageError
from flashbias_convert.fitting import site_fit
from flashbias_convert.fitting.collect import tokens_of
from flashbias_convert.fitting.sites import kept
from flashbias_convert.pair_attention import PairCall
from flashbias_convert.plan import Plan
from flashbias_convert.verification.models import is_exact
from tests import pairformer

ANYTHING = FitOptions(hidden=8, steps=10, check_every=5, energy=None, max_attention_error=None)
START = 8


def block() -> Any:
    pytest.importorskip("transformers")
    from tests.recipes import test_esmfold

    return test_esmfold.block()


def states(tokens: int, seed: int = 1) -> dict[str, Tensor]:
    from tests.recipes.test_esmfold import PAIR, SINGLE

    draw = torch.Generator().manual_seed(seed)
    s = torch.randn(2, tokens, SINGLE, generator=draw)
    return {"sequence_state": s, "pairwise_state": torch.randn(2, tokens, tokens, PAIR,
                                                               generator=draw)}  # fmt: skip


def run(model: nn.Module, tokens: int) -> Tensor:
    with torch.no_grad():
        s, z = model(**states(tokens, seed=9))
    return torch.cat([s.flatten(), z.flatten()])


def fit(model: nn.Module, **changes: Any) -> Plan:
    given: dict[str, Any] = {"rank": 3, "options": ANYTHING, "include": ["tri_att_end"]}
    return fit_sites(model, [states(12), states(12, seed=2)], **{**given, **changes})


def fold(model: Any, tokens: int) -> Tensor:
    residues = torch.randint(0, 20, (2, tokens), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out: Tensor = model(residues, num_recycles=1).s_s
    return out


def test_shorter_calls_are_exact(tmp_path: Path) -> None:
    """Also of a folder that was loaded; networks go on to serve the others."""
    pytest.importorskip("transformers")
    from tests.recipes import test_esmfold

    model, plain = test_esmfold.model(), test_esmfold.model()
    residues = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    plan = fit_sites(model, {"input_ids": residues}, rank=3, options=ANYTHING, from_tokens=START)
    assert len(plan.patched) == 3
    apply_plan(model, plan, backend="sdpa")
    save_model(model, tmp_path / "m.safetensors")
    loaded = load_model(tmp_path / "m.safetensors", backend="sdpa")
    for converted in (model, loaded):
        short, long = (fold(converted, n) - fold(plain, n) for n in (START - 1, START))
        assert short.abs().max() < 1e-4 * fold(plain, START - 1).abs().max()
        assert long.abs().max() > 1e-2 * fold(plain, START).abs().max()
    assert torch.equal(fold(model, START), fold(loaded, START))


@pytest.mark.usefixtures("free_factors")
def test_shorter_calls_can_have_factors_made_once() -> None:
    model, plain = block(), block()
    apply_plan(model, fit(model, from_tokens=START), backend="sdpa")
    given, longer = (states(n)["pairwise_state"] for n in (START - 1, START))
    with torch.no_grad(), factors_once(model, rank=START) as memories:
        first, *others = (model.tri_att_end(given) for _ in range(3))
        exact = plain.tri_att_end(given)
        served = memories[0].served
        assert served > 0
        for _ in range(2):
            model.tri_att_end(longer)  # the same pairs again: networks serve them all the same
        assert memories[0].served == served
    for out in (first, *others):
        assert (out - exact).abs().max() < 1e-4 * exact.abs().max()


def test_networks_are_no_exact_conversion() -> None:
    """Also where nobody has the plan any more."""
    model = block()
    apply_plan(model, fit(model, from_tokens=START), backend="sdpa")
    assert not is_exact("tri_att_end", model.tri_att_end, None)
    exact = block()
    patch_model(exact)
    assert is_exact("tri_att_end", exact.tri_att_end, None)


def test_by_default_costs_say_from_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[PairSite, int]] = []

    def least(site: PairSite, rank: int) -> int:
        asked.append((site, rank))
        return 12

    monkeypatch.setattr(PairSite, "networks_from", least)
    model, plain = block(), block()
    plan = fit(model)
    (site,) = plan.patched
    assert "from 12 tokens on" in site.reason
    (chosen,) = (own for own, rank in asked if rank == 3)  # a plan asks for the usual rank
    assert chosen.heads == site.heads
    assert chosen.pairs is not None and chosen.pairs.rows is None
    apply_plan(model, plan, backend="sdpa")
    networks: Any = model.tri_att_end.score_bias.builder_modules()[FactorNetworks.kind]
    assert networks.from_tokens == 12
    assert (run(model, 11) - run(plain, 11)).abs().max() < 1e-5 * run(plain, 11).abs().max()
    assert (run(model, 12) - run(plain, 12)).abs().max() > 1e-3 * run(plain, 12).abs().max()


def test_inputs_that_are_all_shorter_are_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know what calls get that networks serve, unless somebody asks for it."""
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: 13)
    plan = fit(block())
    (site,) = plan.patched
    assert site.modules is None and "the inputs have at most 12 tokens" in site.reason
    assert "faster from 13 on" in site.reason and "factor networks of rank 3" in site.reason
    assert not any("judged on" in warning for warning in site.warnings)  # none of them serves
    (site,) = fit(block(), from_tokens=13).patched
    assert (
        "judged on inputs of up to 12 tokens, and serve calls with 13 and more"
        in (site.warnings[-1])
    )
    (site,) = fit(block(), from_tokens=12).patched
    assert not any("judged on inputs of up to" in warning for warning in site.warnings)


def test_what_is_faster_at_all_lengths_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: 256)
    plan = fit(block())
    (site,) = plan.patched
    assert site.spec is not None and "builders" not in site.spec
    assert "from_tokens" not in site.spec["builder_modules"][0]["config"]


def test_what_is_slower_at_all_lengths_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit says whether networks hold, and one that misses is left alone as any other."""
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: None)
    seen: list[object] = []
    model, plain = block(), block()
    plan = fit(model, progress=lambda *a: seen.append(a))
    (site,) = plan.patched
    assert seen and site.modules is None and site.builders() == ("dense",)
    assert site.reason.startswith("dense in each call; its networks do not serve: up to 4096")
    assert "--from-tokens 1 has them serve all the same" in site.reason
    assert "(factor networks of rank 3: " in site.reason and kept(plan) == [site]
    assert not any("ms of a call" in warning for warning in site.warnings)
    apply_plan(model, plan, backend="sdpa")
    assert (run(model, 12) - run(plain, 12)).abs().max() < 1e-5 * run(plain, 12).abs().max()
    hard = dataclasses.replace(ANYTHING, energy=0.999999)
    (site,) = (s for s in fit(block(), options=hard).sites if s.name == "tri_att_end")
    assert site.status == "left alone" and site.reason.startswith(site_fit.NOT_REACHED)
    assert "no kernel takes factors of rank 300" in fit(block(), rank=300).patched[0].reason


def test_a_start_is_a_number_of_tokens() -> None:
    with pytest.raises(UsageError, match="from_tokens must be a positive integer"):
        fit(block(), from_tokens=0)


def test_files_whose_networks_serve_all_lengths_stay_as_they_were() -> None:
    old = {"q_features": 4, "k_features": 4, "heads": 2, "rank": 3, "hidden": 8}
    assert FactorNetworks.from_config(old).config() == old
    new = {**old, "from_tokens": 9}
    assert FactorNetworks.from_config(new).config() == new
    with pytest.raises(ValueError, match="from_tokens"):
        FactorNetworks.from_config({**old, "from_tokens": 0})
    with pytest.raises(ValueError, match="factor networks have"):
        FactorNetworks.from_config({**old, "other": 1})


def lengths(plan: Plan) -> list[str]:
    (site,) = plan.patched
    return [w for w in site.warnings if "judged on" in w]


def test_inputs_that_networks_serve_are_the_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among shorter ones; padding does not count, and a single one has to train, too."""
    seen: list[list[int]] = []

    def looked_at(*given: Any, **options: Any) -> Any:
        seen.append([tokens_of(sample) for sample in options["evaluation"]])
        return run_fit(*given, **options)

    run_fit = site_fit.fit
    monkeypatch.setattr(site_fit, "fit", looked_at)
    short = [states(n, seed=n) for n in (6, 7, 8, 6, 7)]
    long = [states(12, seed=n) for n in (1, 2)]
    plan = fit_sites(block(), [*long, *short], rank=3, options=ANYTHING, from_tokens=10,
                     include=["tri_att_end"])  # fmt: skip
    assert seen.pop() == [12] and not lengths(plan)
    padded = states(12)
    padded["mask"] = torch.zeros(2, 12, dtype=torch.long)
    padded["mask"][:, :6] = 1
    plan = fit_sites(block(), [padded, *short], rank=3, options=ANYTHING, from_tokens=10,
                     include=["tri_att_end"])  # fmt: skip
    assert max(seen.pop()) < 10 and "of up to" in lengths(plan)[0]
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: 10)
    (site,) = fit_sites(block(), [padded, *short], rank=3, options=ANYTHING,
                        include=["tri_att_end"]).patched  # fmt: skip
    assert site.modules is None and "the inputs have at most 8 tokens" in site.reason


def test_recipes_without_another_way_have_networks_at_all_lengths() -> None:
    """Whatever is asked for: their bias as it is cannot be served."""
    given: dict[str, Any] = {"recipes": pairformer.RECIPES, "include": "pair", "from_tokens": 99}
    plan = fit_sites(
        pairformer.make_model(), pairformer.make_inputs(), rank=3, options=ANYTHING, **given
    )
    (site,) = plan.patched
    assert site.modules is not None
    networks: Any = site.modules[FactorNetworks.kind]
    assert networks.from_tokens == 1


def test_recipes_that_do_not_say_what_a_bias_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of their costs: networks serve all lengths, as they were asked for."""
    describe = site_fit.SiteFit._described

    def unknown(self: site_fit.SiteFit, recipe: Any) -> Any:
        return dataclasses.replace(describe(self, recipe), pairs=None)

    monkeypatch.setattr(site_fit.SiteFit, "_described", unknown)
    (site,) = fit(block()).patched
    assert site.spec is not None and "builders" not in site.spec


def test_what_a_recipe_cannot_tell_fails_its_own_site_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = PairCall.observed

    def observed(self: PairCall) -> Any:
        if self.q.dim() == 4:  # the sequence's attention
            raise RuntimeError("sizes do not match")
        return pairs(self)

    monkeypatch.setattr(PairCall, "observed", observed)
    plan = fit(block(), include=(), from_tokens=1)
    status = {site.name: (site.status, site.reason) for site in plan.sites}
    assert status["seq_attention"][0] == "failed"
    assert "what it sees cannot be told: sizes do not match" in status["seq_attention"][1]
    assert status["tri_att_start"][0] == status["tri_att_end"][0] == "patched"


def test_keys_that_are_other_tokens_have_the_bias_itself() -> None:
    q, k = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 7, 4)
    call = PairCall(q, k, k, q, bias=lambda: q, features=lambda: pytest.fail("asked"))
    with pytest.raises(ValueError, match="not the same tokens"):
        call.token_features()
    model = block()
    apply_plan(model, fit(model, from_tokens=2), backend="sdpa")
    site = model.tri_att_end
    given = torch.zeros(1, 1, 2, 5, 7)
    q, k = torch.randn(1, 1, 2, 5, 4), torch.randn(1, 1, 2, 7, 4)
    call = PairCall(q, k, k, given, bias=lambda: given, features=lambda: pytest.fail("asked"))
    plain = (q @ k.mT).softmax(-1) @ k
    with torch.no_grad():
        assert torch.allclose(site.attend(call), plain, atol=1e-5)

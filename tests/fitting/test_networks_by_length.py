"""Fitted networks serve the lengths where they are faster; shorter calls keep their bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import apply_plan, factors_once, fit_sites, load_model, save_model
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite
from flashbias_convert.errors import UsageError
from flashbias_convert.plan import Plan

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
    given = states(START - 1)["pairwise_state"]
    with torch.no_grad(), factors_once(model, rank=START) as memories:
        first, *others = (model.tri_att_end(given) for _ in range(3))
        exact = plain.tri_att_end(given)
        served = memories[0].served
        assert served > 0
        for _ in range(2):
            model.tri_att_end(states(START)["pairwise_state"])
        assert memories[0].served == served
    for out in (first, *others):
        assert (out - exact).abs().max() < 1e-4 * exact.abs().max()


def test_by_default_costs_say_from_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[PairSite, int]] = []

    def least(site: PairSite, rank: int) -> int:
        asked.append((site, rank))
        return 512

    monkeypatch.setattr(PairSite, "networks_from", least)
    model, plain = block(), block()
    plan = fit(model)
    (site,) = plan.patched
    (chosen,) = (own for own, rank in asked if rank == 3)  # a plan asks for the usual rank
    assert chosen.heads == site.heads
    assert chosen.pairs is not None and chosen.pairs.rows is None
    assert site.warnings[-1] == "calls with fewer than 512 tokens keep the bias as it is"
    apply_plan(model, plan, backend="sdpa")
    networks: Any = model.tri_att_end.score_bias.builder_modules()[FactorNetworks.kind]
    assert networks.from_tokens == 512
    assert (run(model, 12) - run(plain, 12)).abs().max() < 1e-5 * run(plain, 12).abs().max()


def test_what_is_faster_at_all_lengths_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: 256)
    plan = fit(block())
    (site,) = plan.patched
    assert site.spec is not None and "builders" not in site.spec
    assert "from_tokens" not in site.spec["builder_modules"][0]["config"]


def test_what_is_slower_at_all_lengths_is_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSite, "networks_from", lambda *_: None)
    seen: list[object] = []
    model, plain = block(), block()
    plan = fit(model, progress=lambda *a: seen.append(a))
    (site,) = plan.patched
    assert not seen and site.modules is None and site.builders() == ("dense",)
    assert "not fitted: up to 4096 tokens networks of rank 3 are slower" in site.reason
    assert "--from-tokens 1 fits them all the same" in site.reason
    apply_plan(model, plan, backend="sdpa")
    assert (run(model, 12) - run(plain, 12)).abs().max() < 1e-5 * run(plain, 12).abs().max()


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

"""Factor networks: they learn, say what they lose, and come out the same every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.builders import builder_module, check_entry, module_entries
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.last_layers import solved
from flashbias_convert.decompose.neural import Check, FitResult, fit, fit_factor_networks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.neural_samples import Sample, squared_error
from flashbias_convert.errors import CheckpointError, DecompositionError, UsageError
from flashbias_convert.terms import LowRank

SLOPES = torch.tensor([1.0, 6.0])


def distance(x_q: Tensor, x_k: Tensor) -> Tensor:
    """Two heads: squared distance with two slopes, and a constant per row that nobody sees."""
    squares = (x_q[..., :, None, :] - x_k[..., None, :, :]).square().sum(-1)
    rows = 100 * x_q.sum(-1)[..., None]
    return (rows - squares).unsqueeze(-3) * SLOPES[:, None, None]


def points(generator: torch.Generator) -> Tensor:
    return torch.rand(24, 2, generator=generator)


def run(**changes: Any) -> FitResult:
    given: dict[str, Any] = {
        "rank": 4, "heads": 2, "hidden": 16, "steps": 40, "learning_rate": 2e-2, "check_every": 10,
        "closed_form": False, "energy": 0.9999,
    }  # fmt: skip
    return fit_factor_networks(distance, points, **{**given, **changes})


def weights(result: FitResult) -> list[Tensor]:
    return list(result.networks.state_dict().values())


def same(a: FitResult, b: FitResult) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def test_a_fit_reaches_what_was_asked_on_points_that_it_never_saw() -> None:
    result = run(steps=600, energy=0.97, max_attention_error=0.1)
    assert result.reached and result.reason.startswith("reached after"), result.reason
    assert result.steps < 600
    assert float(result.loss.energy.min()) >= 0.97
    assert not any(p.requires_grad for p in result.networks.parameters())
    # by hand, on new points: rows centred, relative to the centred bias
    x = points(torch.Generator().manual_seed(99))
    phi_q, phi_k = result.networks.factors(x, x)
    bias, made = distance(x, x).double(), phi_q.double() @ phi_k.double().mT
    centred = bias - bias.mean(-1, keepdim=True)
    error = made - made.mean(-1, keepdim=True) - centred
    lost = error.square().sum((-1, -2)) / centred.square().sum((-1, -2))
    # two samples of 24 points judged 3 %: a third one is within twice that
    assert (lost < 0.06).all(), lost


def test_a_fit_that_misses_says_so() -> None:
    result = run(energy=0.99999, max_attention_error=1e-4)
    assert not result.reached
    assert "all 40 steps are done; energy" in result.reason
    assert "attention error" in result.reason
    assert [c.step for c in result.history] == [0, 10, 20, 30, 40]
    losses = [check.evaluated for check in result.history]
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))


def test_nothing_asked_is_always_reached_and_runs_to_the_end() -> None:
    result = run(energy=None, max_attention_error=None)
    assert result.reached and result.steps == 40


def test_the_best_check_wins_and_not_the_last() -> None:
    # after a closed form, a step that does harm
    result = run(energy=None, max_attention_error=None, closed_form=True, learning_rate=10.0)
    losses = [check.evaluated for check in result.history]
    assert min(losses) < losses[-1]
    lost = 1 - result.loss.energy
    assert float(lost.max()) == pytest.approx(1 - max(c.energy for c in result.history), rel=1e-6)


def test_patience_ends_a_fit() -> None:
    result = run(learning_rate=1e-12, patience=2, steps=400)
    assert result.steps < 400 and "no progress" in result.reason


def test_equal_seeds_give_equal_bits() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = run()
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's numbers are drawn
    torch.manual_seed(4)
    assert same(first, run()) and not same(first, run(seed=1))


@pytest.mark.parametrize("closed_form", [False, True])
def test_an_interrupted_fit_goes_on_with_the_same_bits(tmp_path: Path, closed_form: bool) -> None:
    asked: dict[str, Any] = {"closed_form": closed_form, "energy": 1.0}
    whole = run(**asked)

    def interrupt(check: Check) -> None:
        if check.step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(state=tmp_path / "fit", progress=interrupt, **asked)
    seen: list[int] = []
    resumed = run(state=tmp_path / "fit", progress=lambda check: seen.append(check.step), **asked)
    assert seen == [30, 40]
    assert same(whole, resumed) and resumed.history == whole.history
    again = run(state=tmp_path / "fit", progress=lambda check: seen.append(check.step), **asked)
    assert seen == [30, 40] and same(whole, again) and again.reason == whole.reason


def test_states_of_other_fits_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fit"
    run(state=file)
    for changes in ({"seed": 1}, {"rank": 5}, {"steps": 50}):
        with pytest.raises(UsageError, match="belongs to another fit"):
            run(state=file, **changes)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not the state of a fit"):
        run(state=file)
    torch.save({"format": 1, "identity": {}}, file)
    with pytest.raises(CheckpointError, match="not the state of a fit"):
        run(state=file)
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]


def test_a_fit_that_explodes_keeps_finite_networks() -> None:
    result = run(learning_rate=1e25)
    assert not result.reached and "no longer finite" in result.reason
    assert all(t.isfinite().all() for t in weights(result))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_a_bias_is_an_error(value: float) -> None:
    def broken(x_q: Tensor, x_k: Tensor) -> Tensor:
        return distance(x_q, x_k).index_fill(-1, torch.tensor([3]), value)

    with pytest.raises(DecompositionError, match="bias of a sample"):
        fit_factor_networks(broken, points, rank=2, heads=2, hidden=4, steps=10)


def test_a_bias_of_another_shape_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"must have shape \(3, 24, 24\)"):
        run(heads=3)
    with pytest.raises(UsageError, match="rank must be a positive integer"):
        run(rank=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0}, {"hidden": 1.5}, {"check_every": 0}, {"patience": 0}, {"loss": "l2"},
        {"schedule": "linear"}, {"learning_rate": 0.0}, {"learning_rate": math.nan},
        {"energy": 0.0}, {"energy": math.nan}, {"max_attention_error": 1.5},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        FitOptions(**changes)


def test_learning_rates() -> None:
    step = FitOptions(schedule="step", learning_rate=1.0)
    assert [step.rate(s) for s in (0, 49, 50, 149)] == [1, 1, 0.95, 0.95**2]
    cosine = FitOptions(schedule="cosine", learning_rate=1.0, steps=100)
    assert cosine.rate(0) == 1 and cosine.rate(50) == pytest.approx(0.5)
    assert 0 < cosine.rate(99) < 1e-3
    assert FitOptions(schedule="constant", learning_rate=0.5).rate(9999) == 0.5


# -- losses --------------------------------------------------------------------------------


def networks(heads: int = 2) -> FactorNetworks:
    made = FactorNetworks(3, 5, heads, rank=4, hidden=8)
    made.initialise(torch.Generator().manual_seed(0))
    return made


def sample(made: FactorNetworks, attention: bool = True) -> tuple[Sample, Tensor]:
    """Tokens with a random bias, and the product of their factors."""
    draw = torch.Generator().manual_seed(1)
    x_q, x_k = (torch.randn(6, 3, generator=draw), torch.randn(7, 5, generator=draw))
    q, k, v = (torch.randn(3, 2, n, 4, generator=draw) for n in (6, 7, 7))
    bias = torch.randn(2, 6, 7, generator=draw)
    phi_q, phi_k = made.factors(x_q, x_k)
    product = (phi_q @ phi_k.mT).detach()
    if attention:
        return Sample(x_q, x_k, bias, q, k, v, 0.5), product
    return Sample(x_q, x_k, bias), product


@pytest.mark.parametrize("loss", ["centred", "raw", "attention", "softmax"])
def test_losses_are_what_they_say(loss: Any) -> None:
    made = networks()
    given, product = sample(made, attention=loss != "softmax")
    bias, wide = given.bias.double(), product.double()
    if loss == "raw":
        error = wide - bias
    elif loss == "centred":
        error = wide - bias
        error = error - error.mean(-1, keepdim=True)
    elif loss == "softmax":
        error = wide.softmax(-1) - bias.softmax(-1)
    else:
        assert given.q is not None and given.k is not None and given.v is not None
        scores = 0.5 * given.q.double() @ given.k.double().mT
        v = given.v.double()
        error = (scores + wide).softmax(-1) @ v - (scores + bias).softmax(-1) @ v
    others = [d for d in range(error.dim()) if d != error.dim() - 3]
    found = squared_error(made, given, "attention" if loss == "softmax" else loss)
    # sums of a few dozen fp32 products
    torch.testing.assert_close(found.double(), error.square().mean(others), rtol=1e-4, atol=1e-7)


def test_row_constants_are_lost_on_the_centred_loss_alone() -> None:
    made = networks()
    given, product = sample(made)
    rows = torch.linspace(-3, 3, 6)[:, None]
    shifted = Sample(given.x_q, given.x_k, product + rows)
    rounding = (16 * torch.finfo(torch.float32).eps * 4) ** 2
    assert (squared_error(made, shifted, "centred") < rounding).all()
    assert (squared_error(made, shifted, "raw") > 1).all()


def test_attention_is_fitted_with_q_k_and_v() -> None:
    target = networks()
    given, _ = sample(target)
    options = FitOptions(
        hidden=8, steps=60, closed_form=False, loss="attention", learning_rate=2e-2,
        check_every=60, energy=None, max_attention_error=None,
    )  # fmt: skip
    result = fit(lambda _: given, rank=4, heads=2, options=options, evaluation=[given])
    start = FactorNetworks(3, 5, 2, 4, 8)
    assert (
        squared_error(result.networks, given, "attention").mean()
        < squared_error(start, given, "attention").mean()
    )


# -- closed forms --------------------------------------------------------------------------


def test_last_layers_are_recovered_from_samples_of_other_tokens() -> None:
    target, made = networks(), networks()
    draw = torch.Generator().manual_seed(4)
    samples = []
    for _ in range(3):  # none of them alone has as many tokens as there are hidden units
        x_q, x_k = torch.randn(6, 3, generator=draw), torch.randn(7, 5, generator=draw)
        phi_q, phi_k = target.factors(x_q, x_k)
        samples.append(Sample(x_q, x_k, (phi_q @ phi_k.mT).detach()))
    for network in (made.phi_q, made.phi_k):
        torch.nn.init.zeros_(network.third.weight)
    size = squared_error(made, samples[0], "raw")
    left = []
    for weights in solved(made, samples, centred=False):
        made.load_state_dict({**made.state_dict(), **weights})
        left.append((squared_error(made, samples[0], "raw") / size).max())
    assert left[-1] < left[0] < 1e-3  # less penalty, less error


def test_a_closed_form_of_one_sample_is_the_best_of_its_rank() -> None:
    made = FactorNetworks(2, 2, 1, rank=3, hidden=12)
    made.initialise(torch.Generator().manual_seed(0))
    x = points(torch.Generator().manual_seed(5))
    given = Sample(x, x, distance(x, x)[:1])
    with torch.no_grad():
        errors = []
        for weights in solved(made, [given], centred=True):
            made.load_state_dict({**made.state_dict(), **weights})
            errors.append(float(squared_error(made, given, "centred")))
        # what the hidden units can say at all, cut at rank 3
        ones = torch.ones(24, 1)
        h_q, h_k = (
            torch.cat([n.hidden_units(x), ones], 1).double() for n in (made.phi_q, made.phi_k)
        )
        centred = given.bias[0].double() - given.bias[0].double().mean(-1, keepdim=True)
        left, right = torch.linalg.qr(h_q)[0], torch.linalg.svd(h_k - h_k.mean(0), False)[0][:, :12]
        inside = left.mT @ centred @ right
        kept = torch.linalg.svdvals(inside)[:3].square().sum()
        best = float((centred.square().sum() - kept) / centred.numel())
    assert best * (1 - 1e-4) <= errors[-1] <= errors[0]
    assert errors[-1] - best < 1e-2 * float(centred.square().mean())


def test_a_fit_begins_at_least_as_well_as_a_closed_form_and_keeps_it() -> None:
    plain, solved_first = run(energy=1.0), run(energy=1.0, closed_form=True)
    assert solved_first.history[0].evaluated < 0.1 * plain.history[0].evaluated
    best = min(check.evaluated for check in solved_first.history)
    assert float(1 - solved_first.loss.energy.mean()) == pytest.approx(best, rel=0.5)


# -- networks ------------------------------------------------------------------------------


def test_a_term_is_made_of_features() -> None:
    made = networks()
    x_q, x_k = torch.randn(2, 1, 6, 3), torch.randn(2, 1, 7, 5)
    term = made.make(x_q=x_q, x_k=x_k)
    assert isinstance(term, LowRank) and term.phi_q.shape == (2, 1, 2, 6, 4)
    assert term.phi_k.shape == (2, 1, 2, 7, 4) and term.split == 0
    with pytest.raises(ValueError, match=r"x_q must have shape \(\*batch, tokens, 3\)"):
        made.make(x_q=x_k, x_k=x_k)


def test_networks_look_at_one_token_at_a_time() -> None:
    made, x = networks(), torch.randn(6, 3)
    # one token, or all: another order of additions
    torch.testing.assert_close(made.phi_q(x)[2:3], made.phi_q(x[2:3]))


def test_weights_stay_fp32_and_autocast_does_not_reach_them() -> None:
    made, x_q, x_k = networks(), torch.randn(6, 3), torch.randn(7, 5)
    expected = made.make(x_q=x_q, x_k=x_k)
    made.to(torch.bfloat16)
    assert all(t.dtype == torch.float32 for t in made.state_dict().values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = made.make(x_q=x_q, x_k=x_k)
    assert torch.equal(term.phi_q, expected.phi_q) and torch.equal(term.phi_k, expected.phi_k)


def test_features_that_never_change_do_no_harm() -> None:
    made = networks()
    x = torch.randn(50, 3)
    x[:, 1] = 7.0
    made.phi_q.standardise(x)
    assert made.phi_q.spread[1] == 1 and made.phi_q.mean[1] == 7
    made.check()


def test_networks_that_wait_for_weights_draw_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    FactorNetworks.from_config(networks().config())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_entry_of_a_plan_must_fit_its_sizes() -> None:
    (entry,) = module_entries({"f": networks()})
    check_entry(entry)
    huge = {**entry, "config": {**entry["config"], "hidden": 10**7}}
    with pytest.raises(ValueError, match="not those of its sizes"):
        check_entry(huge)  # 400 TB, if they were allocated
    for config in ({}, {**entry["config"], "rank": -1}, {**entry["config"], "depth": 9}):
        with pytest.raises(ValueError):
            builder_module("factor_network", config)
    with pytest.raises(ValueError, match="unknown kind of builder"):
        builder_module("os.system", {})


def test_damaged_weights_are_noticed() -> None:
    made = networks()
    made.phi_k.spread[0] = 0
    with pytest.raises(ValueError, match="not positive"):
        made.check()
    made.phi_k.spread[0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        made.check()

"""Launches are recorded once per shape, and the settings that a clock calls fastest are kept."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from flashbias_convert import Dense, patch_model
from flashbias_convert.attention import flashbias_attention, launch
from flashbias_convert.attention.tuning import LaunchSettings
from flashbias_convert.launch_tuning import candidates, recorded_launches, tune_launches
from flashbias_convert.launch_tuning.tune import WORTHWHILE
from tests.attention.cases import Inputs
from tests.toy import TOY, make_input, make_model

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="the kernel needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def call(n: int, rank: int | None = 3) -> torch.Tensor:
    x = Inputs(DEVICE, torch.float16, batch=(1,), heads=1, n=n)
    bias = None if rank is None else x.bias(x.low_rank(rank))
    return flashbias_attention(x.q, x.k, x.v, bias, backend="triton")


def test_each_class_of_shapes_is_recorded_once() -> None:
    with recorded_launches() as launches:
        for n in (20, 20, 33):
            call(n)
        call(20, None)
    assert [(each.shape.n, each.shape.columns) for each in launches] == [
        (20, 16), (33, 16), (20, 0),
    ]  # fmt: skip
    call(50)
    assert len(launches) == 3


def test_the_fastest_settings_are_kept_and_those_that_fail_are_told() -> None:
    with recorded_launches() as launches:
        expected = call(20)
    options = candidates(launches[0].shape)
    assert len(set(options)) == len(options) > 3
    used: list[LaunchSettings] = []

    def clock(run: Callable[[], None]) -> float:
        assert launch._forced is not None
        used.append(launch._forced)
        if launch._forced == options[1]:
            raise RuntimeError("out of resource\nand more")
        run()
        return 1.0 if launch._forced == options[2] else 2.0

    (found,) = tune_launches(launches, clock=clock)
    assert used == options
    assert (found.settings, found.best_ms, found.rule_ms) == (options[2], 1.0, 2.0)
    assert found.failed == {options[1]: "out of resource"}
    assert found.tried == len(options) - 1
    assert torch.equal(call(20), expected)  # nothing in use has changed


def test_noise_does_not_replace_the_rule() -> None:
    with recorded_launches() as launches:
        call(20)
    times = iter([1.0, *[WORTHWHILE + 0.001] * 100])
    (found,) = tune_launches(launches, clock=lambda _: next(times))
    assert found.settings == candidates(launches[0].shape)[0]
    assert found.best_ms == found.rule_ms == 1.0


def test_a_kernel_that_does_not_run_at_all_is_an_error() -> None:
    with recorded_launches() as launches:
        call(20)

    def broken(_: Callable[[], None]) -> float:
        raise RuntimeError("no such card")

    with pytest.raises(RuntimeError, match="does not run on this card: no such card"):
        tune_launches(launches, clock=broken)


def test_on_a_card_without_room_for_the_rule_smaller_settings_are_the_yardstick() -> None:
    from triton.runtime.errors import OutOfResources

    with recorded_launches() as launches:
        call(20)
    rule = candidates(launches[0].shape)[0]
    first = rule.smaller()
    fits = None if first is None else first.smaller()
    assert fits is not None

    def clock(_: Callable[[], None]) -> float:
        assert launch._forced is not None
        if launch._forced.block_n * launch._forced.num_stages > fits.block_n * fits.num_stages:
            raise OutOfResources(2, 1, "shared memory")
        return 1.0

    (found,) = tune_launches(launches, clock=clock)
    assert found.settings == fits and found.rule_ms == 1.0
    assert rule in found.failed and fits not in found.failed


@torch.no_grad()
def test_the_launches_of_a_patched_model_can_be_repeated() -> None:
    model = make_model().to(DEVICE)
    patch_model(model, recipes=[TOY], backend="triton", force_all=True)
    with recorded_launches() as launches:
        model(make_input().to(DEVICE))
    assert launches
    results = tune_launches(launches, clock=lambda run: run() or 1.0)
    assert [r.shape for r in results] == [each.shape for each in launches]
    assert all(not r.failed for r in results)


def test_rows_that_may_share_a_bias_have_settings_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a batch that shares it; what is launched is what the rule, or a local table, says."""
    monkeypatch.setattr(launch, "_PLANS", {})
    with recorded_launches() as launches:
        for size in ((), (2,)):
            x = Inputs(DEVICE, torch.float16, batch=(2,), heads=1, n=40)
            dense = Dense(bias=x.normal(*size, 1, 40, 40).half())
            flashbias_attention(x.q, x.k, x.v, x.bias(dense), backend="triton")
    assert [each.shape.shared for each in launches] == [True, False]
    entries = [{s.entries for s in candidates(each.shape)} for each in launches]
    assert entries == [{1, 2}, {1}]
    assert [plan[1].entries for plan in launch._PLANS.values() if plan is not None] == [2, 1]

"""Tuning of the backward kernels: what is tried, and what of a step is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from tune_backward import KERNELS, MOST_HELD, Case

from flashbias_convert.attention.tuning import LaunchSettings

CASES = [Case(k, d, c, False) for k in KERNELS for d in (32, 64, 128) for c in (0, 16)]


@pytest.mark.parametrize("case", CASES)
def test_what_is_tried_fits_registers(case: Case) -> None:
    tried = case.candidates()
    assert len(tried) == len(set(tried)) >= 10
    for settings in tried:
        rows = settings.block_m if case.kernel == "queries" else settings.block_n
        assert case.held(settings) <= MOST_HELD and rows >= 16 * settings.num_warps
    if case.d <= 64:
        assert case.present(4096) in tried
    else:
        assert LaunchSettings(128, 128, 4, 1) not in tried


@pytest.mark.parametrize("trained", [False, True])
def test_a_step_has_the_gradients_that_its_kernel_makes(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import measure_training_costs

    attend = measure_training_costs.flashbias_attention
    monkeypatch.setattr(
        measure_training_costs,
        "flashbias_attention",
        lambda *args, backend, **options: attend(*args, backend="eager", **options),
    )
    shapes = {}
    for kernel in KERNELS:
        step = Case(kernel, 16, 8, trained).step(24, 1, "cpu")
        shapes[kernel] = [tuple(x.shape) for x in step()]
    qkv, factors = (1, 8, 24, 16), [(8, 24, 8)] if trained else []
    assert shapes["queries"] == [qkv, *factors]
    assert shapes["keys"] == [qkv, qkv, *factors]
    assert shapes["all"] == [qkv, qkv, qkv, *factors, *factors]
    assert torch.is_grad_enabled()

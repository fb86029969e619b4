"""What an approximation loses: definitions, invariances, and inputs that divide by zero."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.decompose import loss as loss_module
from flashbias_convert.decompose import measure, row_center, svd_factors


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def near(bias: torch.Tensor) -> torch.Tensor:
    """An approximation that keeps most of the energy."""
    return bias + 0.2 * gaussian(*bias.shape, seed=1)


def causal(n: int) -> torch.Tensor:
    return torch.ones(n, n).tril().bool()


def test_row_center_removes_the_mean_of_every_row():
    centred = row_center(gaussian(3, 5, 7) + 100)
    assert centred.mean(-1).abs().max() < 1e-13


@pytest.mark.parametrize("value", [0.1, 1e30, -7.3])
def test_row_center_makes_a_constant_row_exactly_zero(value: float):
    bias = torch.full((1, 4, 7), value)
    bias[:, 2] *= 3
    assert row_center(bias).abs().max() == 0
    assert row_center(bias, causal(7)[:4])[:, causal(7)[:4]].abs().max() == 0


def test_row_center_takes_the_mean_over_visible_keys_only():
    bias = gaussian(2, 6, 6)
    bias[..., ~causal(6)] = 1e6  # must not leak into the mean
    centred = row_center(bias, causal(6))
    seen = centred.masked_fill(~causal(6), 0).sum(-1)
    assert seen.abs().max() < 1e-12


def test_row_center_leaves_a_row_that_sees_nothing():
    visible = causal(4)
    visible[2] = False
    bias = gaussian(1, 4, 4)
    centred = row_center(bias, visible)
    assert torch.equal(centred[:, 2], bias[:, 2])
    assert centred.isfinite().all()


def test_measure_follows_the_definitions():
    bias = gaussian(2, 5, 6)
    other = near(bias)
    found = measure(bias, other)
    for h in range(2):
        centred = bias[h] - bias[h].mean(-1, keepdim=True)
        error = bias[h] - other[h]
        error = error - error.mean(-1, keepdim=True)
        p, q = bias[h].softmax(-1), (other[h]).softmax(-1)
        expected_energy = 1 - float(error.square().sum() / centred.square().sum())
        assert 0 < expected_energy < 1
        assert float(found.energy[h]) == pytest.approx(expected_energy, abs=1e-12)
        assert float(found.logit_error_max[h]) == pytest.approx(float(error.abs().max()))
        assert float(found.logit_error_rms[h]) == pytest.approx(float(error.square().mean().sqrt()))
        variation = float((p - q).abs().sum(-1).mean() / 2)
        assert float(found.attention_error[h]) == pytest.approx(variation)


def test_energy_is_the_kept_share_of_squared_singular_values():
    bias = row_center(gaussian(1, 8, 8))
    u, s, vh = torch.linalg.svd(bias)
    kept = (u[..., :3] * s[..., None, :3]) @ vh[..., :3, :]
    share = s[0, :3].square().sum() / s[0].square().sum()
    assert float(measure(bias, kept).energy) == pytest.approx(float(share), abs=1e-12)


def test_a_constant_per_row_is_no_loss():
    bias = gaussian(2, 6, 8)
    found = measure(bias, bias + gaussian(2, 6, 1) * 50)
    assert found.energy.min() > 1 - 1e-12
    assert found.logit_error_max.max() < 1e-12
    assert found.attention_error.max() < 1e-12


def test_swapping_all_attention_is_an_attention_error_of_one():
    bias = torch.zeros(1, 2, 2)
    bias[..., 0] = 1000.0
    assert float(measure(bias, -bias).attention_error) == 1.0


@pytest.mark.parametrize("value", [0.0, 3.7])
def test_a_bias_without_shape_gives_numbers_not_nan(value: float):
    bias = torch.full((2, 5, 5), value)
    kept = measure(bias, torch.zeros_like(bias))
    assert kept.energy.tolist() == [1.0, 1.0]
    assert kept.attention_error.tolist() == [0.0, 0.0]
    spoilt = measure(bias, gaussian(2, 5, 5))
    assert spoilt.energy.tolist() == [0.0, 0.0]
    assert spoilt.logit_error_rms.min() > 0


def test_hidden_cells_count_for_nothing():
    bias = gaussian(2, 6, 6)
    other = near(bias)
    spoilt = other.masked_fill(~causal(6), 1e5)
    expected, found = measure(bias, other, causal(6)), measure(bias, spoilt, causal(6))
    for name, value in vars(expected).items():
        assert torch.allclose(getattr(found, name), value, atol=1e-12), name
    assert not torch.allclose(measure(bias, spoilt).energy, expected.energy)


def test_rows_that_see_nothing_have_no_say():
    visible = causal(6)
    visible[1] = False
    bias = gaussian(1, 6, 6)
    other = near(bias)
    other[:, 1] += 1e3
    found = measure(bias, other, visible)
    rows = [0, 2, 3, 4, 5]
    expected = measure(bias[:, rows], other[:, rows], visible[rows])
    assert torch.allclose(found.attention_error, expected.attention_error)
    assert torch.allclose(found.logit_error_rms, expected.logit_error_rms)
    assert torch.allclose(found.energy, expected.energy)
    nothing = measure(bias, other, torch.zeros_like(visible))
    assert float(nothing.attention_error) == 0.0
    assert float(nothing.energy) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float64(dtype: torch.dtype):
    bias = (gaussian(2, 6, 6) * 100).to(dtype)
    found = measure(bias, bias + 0)
    assert found.energy.dtype == torch.float64
    assert found.energy.tolist() == [1.0, 1.0]


def test_chunks_factors_and_broadcasts_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch):
    bias = gaussian(3, 2, 8, 6)
    term = svd_factors(bias, energy=0.8)
    whole = measure(bias, term.dense(8, 6, dtype=torch.float64))
    monkeypatch.setattr(
        loss_module, "chunks", lambda count, *_: (slice(i, i + 1) for i in range(count))
    )
    for approximation in (term, term.dense(8, 6, dtype=torch.float64)):
        found = measure(bias, approximation)
        assert found.energy.shape == (3, 2)
        for name, value in vars(whole).items():
            assert torch.allclose(getattr(found, name), value, atol=1e-12), name
    assert measure(bias, torch.zeros(())).attention_error.shape == (3, 2)


def test_the_worst_batch_entry_decides():
    bias = gaussian(4, 2, 6, 6)
    other = bias.clone()
    other[1, 0] += gaussian(6, 6, seed=2)
    found = measure(bias, other)
    worst = found.worst_over_batch()
    assert worst.energy.tolist() == [float(found.energy[1, 0]), 1.0]
    assert worst.attention_error.tolist() == [float(found.attention_error[1, 0]), 0.0]
    assert worst.logit_error_max[0] == found.logit_error_max[1, 0] > 0

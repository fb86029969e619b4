"""ALiBi slopes and spatial distance against independent formulas."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import Alibi
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.decompose.closed_forms import alibi_slopes, spatial_distance
from flashbias_convert.errors import UsageError


def test_slopes_of_six_heads():
    found = alibi_slopes(6, "bloom")
    assert found.tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    plain = alibi_slopes(6, "geometric")
    assert plain.tolist() == pytest.approx([256 ** (-i / 6) for i in range(1, 7)])


@pytest.mark.parametrize("heads", [1, 3, 6, 12, 16, 25, 40, 50, 112])
def test_slopes_equal_those_of_the_libraries(heads: int):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt

    of_bloom = bloom(torch.ones(1, 3, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads, "bloom"), of_bloom, rtol=1e-6)
    of_mpt = mpt(heads, 3).reshape(heads, 3)
    assert torch.allclose(alibi_slopes(heads, "mpt"), of_mpt[:, 2] - of_mpt[:, 1], rtol=1e-6)
    assert len(alibi_slopes(heads, "geometric")) == heads


def test_the_three_conventions_agree_on_powers_of_two():
    for heads in (1, 2, 8, 32):
        slopes = [alibi_slopes(heads, c) for c in ("bloom", "mpt", "geometric")]
        assert torch.equal(slopes[0], slopes[1]) and torch.equal(slopes[0], slopes[2])


def test_alibi_has_the_sign_of_flash_attention():
    """attn_bias_from_alibi_slopes: -slope * |i + M - N - j|; keys far in the past count less."""
    n, m, slopes = 3, 5, alibi_slopes(2)
    for symmetric in (False, True):
        bias = Alibi(slopes=slopes, symmetric=symmetric).dense(n, m)
        for h in range(2):
            for i in range(n):
                for j in range(i + m - n + 1):
                    expected = -float(slopes[h]) * abs(i + m - n - j)
                    assert float(bias[h, i, j]) == pytest.approx(expected)


@pytest.mark.parametrize("dimension", [1, 2, 3, 7])
@pytest.mark.parametrize("shift", [0.0, 5000.0])
def test_distance_up_to_a_constant_per_row(dimension: int, shift: float):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, dimension, generator=generator, dtype=torch.float64) + shift
    y = torch.randn(2, 11, dimension, generator=generator, dtype=torch.float64) + shift
    bias = spatial_distance(x, y, weight=1.5, heads=3)
    assert bias.terms[0].phi_q.shape[-1] == dimension
    expected = -1.5 * torch.cdist(x, y).square()[:, None]
    found = bias.dense(9, 11, dtype=torch.float64)
    assert found.shape == (2, 3, 9, 11)
    rest = found - expected
    assert (rest - rest.mean(-1, keepdim=True)).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 100.0, 1000.0, 5000.0])
def test_points_far_from_the_origin_keep_their_distances(
    shift: float, dtype: torch.dtype, backend: str
):
    """x^2 - 2 x y + y^2 of fp32 numbers would lose all of 0.25 at 5000, and of fp16 at 100."""
    points = torch.tensor([[0.0], [0.5], [1.0]]) + shift
    bias = spatial_distance(points)
    found = bias.dense(3, 3)[0]
    expected = -torch.tensor([[0.0, 0.25, 1.0], [0.25, 0.0, 0.25], [1.0, 0.25, 0.0]])
    assert torch.equal(found - found.diagonal()[:, None], expected)
    q, k = torch.zeros(2, 1, 1, 3, 8, dtype=dtype).unbind(0)
    weights = torch.eye(3, dtype=dtype)[None, None]
    out = flashbias_attention(q, k, weights, bias, backend=backend)[0, 0]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected.softmax(-1), rtol=2 * eps, atol=0.0)


def test_distance_with_a_weight_per_query_and_head():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64) + 100
    weight = torch.rand(4, 8, generator=generator, dtype=torch.float64)
    bias = spatial_distance(x, weight=weight, heads=4)
    assert bias.terms[0].phi_q.shape == (4, 8, 4)
    expected = -weight[..., None] * torch.cdist(x, x).square()
    rest = bias.dense(8, 8, dtype=torch.float64) - expected
    assert (rest - rest.mean(-1, keepdim=True)).abs().max() < 1e-4


def test_bad_arguments_are_named():
    with pytest.raises(UsageError, match="heads must be"):
        alibi_slopes(0)
    with pytest.raises(UsageError, match="known are bloom"):
        alibi_slopes(3, "other")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="same dimension"):
        spatial_distance(torch.zeros(3, 2), torch.zeros(3, 3))

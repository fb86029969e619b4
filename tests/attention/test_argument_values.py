"""What the arguments of attention mean: scale, cosine, causality, places, masks, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbias_convert import (
    Dense,
    KeyBias,
    LowRank,
    Regions,
)
from flashbias_convert.attention import flashbias_attention
from tests.support import assert_parity

from .cases import Inputs, check, plain_of, truth_of, views


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, -0.7, 1e-6, 30.0])
def test_scale_is_taken_as_given(
    scale: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=64)  # a large scale makes errors large in a few rows
    check(x, x.bias(x.low_rank(3), x.table()), backend, scale=scale)
    check(x, x.bias(x.low_rank(3)), backend, scale=scale)


def test_scale_zero_leaves_the_bias_alone(backend: str, device: torch.device) -> None:
    x = Inputs(device, n=20)
    bias = x.bias(x.dense())
    expected = bias.dense(20, 20).softmax(-1) @ x.v
    out = flashbias_attention(x.q, x.k, x.v, bias, scale=0.0, backend=backend)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_keys_that_a_key_bias_hides(
    hidden: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Numbers that half precision does not hold, in some of the keys of one batch entry."""
    x = Inputs(device, dtype, n=20, heads=2)
    values = x.normal(*x.q.shape[:-3], 1, x.m)
    values[0, ..., 13:] = hidden
    check(x, x.bias(KeyBias(values=values)), backend)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_row_of_which_a_key_bias_hides_all_is_zero(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=20, heads=2)
    values = x.normal(*x.q.shape[:-3], 1, x.m)
    values[0] = float("-inf")
    out = flashbias_attention(x.q, x.k, x.v, x.bias(KeyBias(values=values)), backend=backend)
    assert not out[0].any() and out[1:].isfinite().all() and out[1:].any()


@pytest.mark.parametrize("cosine", [False, True])
def test_scale_per_head(
    cosine: bool, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=20, heads=4)
    scale = torch.tensor([0.0, 0.3, 10.0, 100.0] if cosine else [0.0, 0.3, -1.0, 2.0])
    check(x, x.bias(x.low_rank(3)), backend, scale=scale.to(device), cosine=cosine)


def test_cosine_keeps_zero_rows(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Padding tokens are zero, and half-precision normalisation divides by zero on them."""
    x = Inputs(device, dtype, n=20)
    x.k[..., :7, :] = 0
    x.q[..., 3:9, :] = 0
    truth = truth_of(x, None, cosine=True, scale=10.0)
    out = flashbias_attention(x.q, x.k, x.v, cosine=True, scale=10.0, backend=backend)
    assert out.isfinite().all()
    assert (out - truth).abs().max() < 0.05


def test_causal_is_aligned_at_the_last_key(backend: str, device: torch.device) -> None:
    """Decoding with a cache equals the last rows of the full pass."""
    x = Inputs(device, n=9, heads=2)
    bias = x.bias(x.alibi())
    full = flashbias_attention(x.q, x.k, x.v, bias, causal=True, backend=backend)
    for rows in (1, 3):
        part = flashbias_attention(
            x.q[..., -rows:, :], x.k, x.v, bias, causal=True, backend=backend
        )
        assert torch.allclose(part, full[..., -rows:, :], atol=1e-5)
    early = flashbias_attention(
        x.q[..., 2:4, :], x.k, x.v, bias, causal=True, query_start=2, backend=backend
    )
    assert torch.allclose(early, full[..., 2:4, :], atol=1e-5)


def test_query_start_per_batch_entry(backend: str, device: torch.device) -> None:
    x = Inputs(device, batch=(3,), n=4, m=11)
    bias = x.bias(x.alibi(symmetric=True))
    starts = torch.tensor([0, 5, -2], device=device)
    out = flashbias_attention(x.q, x.k, x.v, bias, causal=True, query_start=starts, backend=backend)
    for i, start in enumerate([0, 5, -2]):
        one = flashbias_attention(
            x.q[i], x.k[i], x.v[i], bias, causal=True, query_start=start, backend=backend
        )
        assert torch.allclose(out[i], one, atol=1e-5)
    assert (out[2, :, :2] == 0).all(), "rows before the first key see nothing"


def test_a_diagonal_follows_the_start_of_each_batch_entry(
    backend: str, device: torch.device
) -> None:
    x = Inputs(device, batch=(3,), n=4, m=11)
    bias = x.bias(x.rows(x.diagonal()), x.alibi())
    starts = [0, 5, -2]
    out = flashbias_attention(
        x.q, x.k, x.v, bias, query_start=torch.tensor(starts, device=device), backend=backend
    )
    for i, start in enumerate(starts):
        one = flashbias_attention(x.q[i], x.k[i], x.v[i], bias, query_start=start, backend=backend)
        assert torch.allclose(out[i], one, atol=1e-5)


def test_rows_without_any_visible_key_are_zero(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=5, m=5)
    mask = torch.ones(2, 5, dtype=torch.bool, device=device)
    mask[0] = False
    mask[1, 0] = False
    out = flashbias_attention(
        x.q, x.k, x.v, x.bias(x.dense()), key_mask=mask, causal=True, backend=backend
    )
    assert out.isfinite().all()
    assert (out[0] == 0).all()
    assert (out[1, :, 0] == 0).all(), "the first query sees only a masked key"
    assert (out[1, :, 1:] != 0).any()


def test_a_row_of_minus_infinity_gives_zeros(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=5, m=5)
    values = x.dense().bias
    values[:, 2] = float("-inf")
    out = flashbias_attention(x.q, x.k, x.v, x.bias(Dense(bias=values)), backend=backend)
    assert out.isfinite().all()
    assert (out[..., 2, :] == 0).all()
    assert (out[..., 3, :] != 0).any()


@pytest.mark.parametrize("level", [1e3, -1e5])
def test_a_constant_per_row_is_no_loss(
    level: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A bias far from zero would be rounded away in half precision; softmax ignores its level."""
    x = Inputs(device, dtype, n=20)
    low = x.dense()
    lifted = Dense(bias=low.bias + level)
    truth = truth_of(x, x.bias(low))
    out = flashbias_attention(x.q, x.k, x.v, x.bias(lifted), backend=backend)
    # what fp32 itself loses by the level, and the rounding of the dtype
    allowed = 8 * abs(level) * 2.0**-24 + 8 * torch.finfo(dtype).eps
    assert (out - truth).abs().max() < allowed


def test_heads_of_opposite_magnitudes(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Factors of 1e6 and 1e-6 whose product is about one, the other way round in another head."""
    x = Inputs(device, dtype, n=20, heads=2)
    sizes = torch.tensor([1e6, 1e-6], device=device)[:, None, None]
    plain = x.low_rank(3)
    bias = x.bias(LowRank(phi_q=plain.phi_q * sizes, phi_k=plain.phi_k / sizes))
    check(x, bias, backend)


def test_finite_masks_stay_finite(backend: str, device: torch.device) -> None:
    """A shift mask of -100 against a bias of +60 and scores of +30: masked keys may win."""
    x = Inputs(device, torch.float16, n=8, heads=1)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], device=device)
    other = ids[:, None] != ids[None, :]
    bias = x.bias(Regions(ids=ids, value=-100.0), Dense(bias=(60.0 * other)[None]))
    x.q *= 40
    check(x, bias, backend)
    hard = x.bias(Regions(ids=ids, value=-1e30), Dense(bias=(60.0 * other)[None]))
    soft_out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    hard_out = flashbias_attention(x.q, x.k, x.v, hard, backend=backend)
    assert (soft_out - hard_out).abs().max() > 0.1, "the inputs must make the difference visible"


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_bias_of_another_dtype(
    wide: torch.dtype, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype)
    bias = x.bias(Dense(bias=x.dense().bias.to(wide)))
    check(x, bias, backend)


@pytest.mark.parametrize("kind", ["dense", "table"])
def test_a_wider_bias_in_every_backend_of_torch(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Some take an additive mask of another dtype than q, some refuse it, and some misread it."""
    fused = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    x = Inputs(device, dtype, n=43, m=49)  # lengths that are no multiples of 8
    bias = x.bias(getattr(x, kind)())
    for each in (SDPBackend.MATH, fused):
        with sdpa_kernel(each):
            out = flashbias_attention(x.q, x.k, x.v, bias, backend="sdpa")
        assert_parity(out, plain_of(x, bias), truth_of(x, bias))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_any_layout_where_torch_attends(
    which: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows that start between vectors, and a bias whose rows are no multiple of 8."""
    x = Inputs(device, dtype, n=43, m=43)
    bias = x.bias(x.dense())
    plain, truth = plain_of(x, bias), truth_of(x, bias)
    for view in views(getattr(x, which)):
        call = {"q": x.q, "k": x.k, "v": x.v, which: view}
        assert_parity(flashbias_attention(**call, bias=bias, backend="sdpa"), plain, truth)


def test_a_half_precision_dense_bias_with_fp32_queries(backend: str, device: torch.device) -> None:
    x = Inputs(device)
    check(x, x.bias(Dense(bias=x.dense().bias.half())), backend)

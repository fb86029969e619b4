"""Ranks, factors, and what happens where the SVD itself fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashbias_convert.decompose import (
    cumulative_energy,
    measure,
    rank_for_energy,
    row_center,
    spectrum,
    split_columns,
    svd,
    svd_factors,
)
from flashbias_convert.decompose.svd import filled_rank, truncated_svd
from flashbias_convert.errors import DecompositionError, UsageError


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def of_rank(rank: int, n: int = 12, m: int = 10, heads: int = 1) -> torch.Tensor:
    """Row-centred matrices of one rank."""
    return row_center(gaussian(heads, n, rank) @ gaussian(heads, rank, m, seed=1))


def product(term: Any) -> torch.Tensor:
    return term.phi_q.double() @ term.phi_k.double().mT


# -- energy and rank -----------------------------------------------------------------------


@pytest.mark.parametrize(("energy", "rank"), [(0.90, 1), (0.95, 2), (0.99, 3), (1.0, 5)])
def test_energy_is_summed_over_squares(energy: float, rank: int):
    assert int(rank_for_energy(torch.tensor([10, 3, 1, 0.5, 0.1]), energy)) == rank


def test_cumulative_energy():
    share = cumulative_energy(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))  # unsorted, zero
    assert torch.allclose(share, torch.tensor([[0.64, 1.0], [1.0, 1.0]], dtype=torch.float64))
    assert share[:, -1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "energy"), [([3, 1], 0.9), ([99**0.5, 1], 0.99), ([999**0.5, 1], 0.999)]
)
def test_a_tail_of_exactly_the_allowance_is_cut(values: list[float], energy: float):
    assert int(rank_for_energy(torch.tensor(values, dtype=torch.float64), energy)) == 1


def test_energy_near_one_still_counts_small_values():
    values = torch.tensor([1.0, 1e-5, 1e-7], dtype=torch.float64)
    assert int(rank_for_energy(values, 1 - 1e-8)) == 1
    assert int(rank_for_energy(values, 1 - 1e-12)) == 2
    assert int(rank_for_energy(values, 1.0)) == 3  # their squares are lost beside 1


def test_rounding_noise_has_no_rank():
    assert rank_for_energy(spectrum(of_rank(3)), 1.0).tolist() == [3]


def test_rank_for_energy_of_many_unsorted_and_zero():
    values = torch.tensor([[0.1, 0.5, 1, 3, 10], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert rank_for_energy(values, 0.95).tolist() == [2, 0, 5]
    assert rank_for_energy(values, 1e-12).tolist() == [1, 0, 1]


@pytest.mark.parametrize("energy", [0.0, 1.5, float("nan")])
def test_rank_for_energy_refuses_nonsense(energy: float):
    with pytest.raises(UsageError, match="energy"):
        rank_for_energy(torch.ones(3), energy)


# -- centring ------------------------------------------------------------------------------


def test_a_constant_per_row_changes_neither_rank_nor_factors():
    bias = gaussian(1, 64, 64)
    lifted = bias + 100
    plain, moved = svd_factors(bias), svd_factors(lifted)
    assert plain.ranks == moved.ranks
    assert 40 <= plain.max_rank <= 55
    assert torch.allclose(product(plain), product(moved), atol=1e-5)
    assert rank_for_energy(spectrum(lifted, centre=False), 0.99).tolist() == [1]
    assert svd_factors(lifted, centre=False).ranks == (1,)


def test_centring_over_visible_keys():
    n = 16
    visible = torch.ones(n, n).tril().bool()
    at = torch.arange(n, dtype=torch.float64)
    bias = (at[None, :] - at[:, None])[None]  # ALiBi: of the key alone once rows are free
    assert rank_for_energy(spectrum(bias, visible=visible), 1.0).tolist() == [2]
    term = svd_factors(bias, energy=1.0, visible=visible)
    assert float(measure(bias, term, visible).logit_error_max) < 1e-5


# -- factors -------------------------------------------------------------------------------


def test_factors_keep_the_energy_that_was_asked_for_and_no_column_more():
    bias = gaussian(3, 20, 14)
    term = svd_factors(bias, energy=0.9)
    assert measure(bias, term).energy.min() >= 0.9 - 1e-9
    fewer = svd_factors(bias, energy=0.9, max_rank=min(term.ranks) - 1)
    assert measure(bias, fewer).energy.max() < 0.9


def test_ranks_per_head_are_padded_with_zeros():
    bias = torch.cat([of_rank(2), of_rank(5), torch.zeros(1, 12, 10), of_rank(1)])
    term = svd_factors(bias, energy=1 - 1e-12)
    assert term.ranks == (2, 5, 0, 1)
    assert term.phi_q.shape == (4, 12, 5)
    assert term.phi_k.shape == (4, 10, 5)
    assert term.phi_q.dtype == term.phi_k.dtype == torch.float32
    for head, rank in enumerate(term.ranks):
        assert not term.phi_q[head, :, rank:].any()
        assert not term.phi_k[head, :, rank:].any()
    assert torch.allclose(product(term), bias, atol=1e-5)


def test_a_zero_bias_has_rank_zero():
    bias = torch.zeros(2, 8, 8)
    term = svd_factors(bias)
    assert term.ranks == (0, 0)
    assert term.max_rank == 0
    assert torch.equal(term.dense(8, 8), bias)
    assert term.split == 0


def test_identity_has_full_rank():
    bias = 6 * torch.eye(6)[None]
    term = svd_factors(bias)
    assert term.ranks == (5,)  # centring takes one of six away
    assert float(measure(bias, term).attention_error) < 1e-6


def test_columns_are_balanced():
    term = svd_factors(gaussian(2, 9, 9) * 50)
    assert torch.allclose(term.phi_q.norm(dim=-2), term.phi_k.norm(dim=-2), rtol=1e-5)


def test_the_largest_entry_of_every_key_column_is_positive():
    term = svd_factors(gaussian(3, 11, 9), energy=0.95)
    for head, rank in enumerate(term.ranks):
        columns = term.phi_k[head, :, :rank]
        assert (columns.gather(0, columns.abs().argmax(0, keepdim=True)) > 0).all()


def test_signs_do_not_depend_on_rounding_where_plus_and_minus_tie():
    grid = torch.arange(6, dtype=torch.float64)
    bias = torch.exp(-((grid[:, None] - grid) ** 2) / 8)[None]  # columns are odd or even
    expected = svd_factors(bias, energy=0.999)
    for seed in range(5):
        shaken = svd_factors(bias + 1e-13 * gaussian(1, 6, 6, seed=seed), energy=0.999)
        assert torch.allclose(shaken.phi_k, expected.phi_k, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_upcast(dtype: torch.dtype):
    bias = (gaussian(2, 10, 8)).to(dtype)
    term = svd_factors(bias, energy=0.95)
    same = svd_factors(bias.double(), energy=0.95)
    assert term.ranks == same.ranks
    assert torch.equal(term.phi_q, same.phi_q)
    assert torch.equal(spectrum(bias), spectrum(bias.double()))


def test_a_batch_shares_the_largest_rank_of_each_head(monkeypatch: pytest.MonkeyPatch):
    bias = torch.stack([torch.cat([of_rank(1), of_rank(2)]), torch.cat([of_rank(4), of_rank(1)])])
    whole = svd_factors(bias, energy=1 - 1e-12)
    assert whole.ranks == (4, 2)
    assert whole.phi_q.shape == (2, 2, 12, 4)
    assert torch.allclose(product(whole), bias, atol=1e-5)
    monkeypatch.setattr(svd, "chunks", lambda count, *_: (slice(i, i + 1) for i in range(count)))
    assert torch.equal(svd_factors(bias, energy=1 - 1e-12).phi_q, whole.phi_q)
    assert spectrum(bias).shape == (2, 2, 10)


def test_more_batch_dimensions():
    bias = gaussian(2, 3, 4, 7, 5)
    term = svd_factors(bias, energy=0.9)
    assert term.phi_k.shape == (2, 3, 4, 5, term.max_rank)
    assert term.batch_shape() == (2, 3)
    assert float(measure(bias, term).energy.min()) >= 0.9 - 1e-9


# -- columns that need two halves ----------------------------------------------------------


def test_split_counts_the_columns_whose_rounding_would_show():
    phi_q = torch.tensor([[[30.0, 3.0, 0.3]]]).expand(1, 4, 3)
    phi_k = phi_q.clone()
    # rounding is 2**-10 * (900, 9, 0.09); the budget is 2**-11 at least
    assert split_columns(phi_q, phi_k, torch.zeros(1)) == 2
    assert split_columns(phi_q, phi_k, torch.tensor([8 * 0.01])) == 1
    assert split_columns(phi_q, phi_k, torch.tensor([8.0])) == 0


def test_splitting_those_columns_keeps_fp16_within_the_budget():
    at = torch.linspace(0, 1, 24, dtype=torch.float64)
    bias = (-40 * (at[:, None] - at) ** 2 + 4 * torch.cos(9 * at[:, None] * at))[None]
    term = svd_factors(bias, energy=0.999999)
    assert term.split is not None and 0 < term.split < term.max_rank

    def rounded(split: int) -> torch.Tensor:
        halves = []
        for phi in (term.phi_q, term.phi_k):
            low = phi.half().float()
            halves.append(torch.cat([phi[..., :split], low[..., split:]], -1).double())
        return halves[0] @ halves[1].mT

    rms = float(measure(bias, term).logit_error_rms)
    budget = max(2.0**-11, rms / 8)
    assert float((rounded(term.split) - product(term)).abs().max()) <= budget * term.max_rank
    assert float((rounded(0) - product(term)).abs().max()) > budget


# -- refusals and retries ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float):
    bias = torch.zeros(2, 4, 4)
    bias[1, 2, 3] = bad
    for call in (svd_factors, spectrum):
        with pytest.raises(DecompositionError, match="1 entries that are NaN or infinite"):
            call(bias)


@pytest.mark.parametrize(
    "bias", [torch.zeros(4, 4), torch.zeros(2, 4, 4).int(), torch.zeros(2, 0, 4)]
)
def test_other_shapes_and_dtypes_are_refused(bias: torch.Tensor):
    with pytest.raises(DecompositionError, match="floating point of shape"):
        svd_factors(bias)


def test_absurd_sizes_are_refused_before_memory_is_taken():
    bias = torch.zeros(1, 1, 1).expand(1, 65536, 65536)
    for call in (svd_factors, spectrum):
        with pytest.raises(DecompositionError, match="65536 x 65536"):
            call(bias)


def failing(times: int, real: Any) -> Any:
    """`real`, but its first calls do not converge."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise torch.linalg.LinAlgError("did not converge")
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("times", [1, 2])
def test_an_svd_that_does_not_converge_is_tried_again(times: int, monkeypatch: pytest.MonkeyPatch):
    # once: on the CPU; twice: by the Gram matrix, of a wide matrix here
    bias = gaussian(1, 8, 12)
    expected = svd_factors(bias, energy=0.9)
    values = spectrum(bias)
    monkeypatch.setattr(torch.linalg, "svd", failing(times, torch.linalg.svd))
    monkeypatch.setattr(torch.linalg, "svdvals", failing(times, torch.linalg.svdvals))
    found = svd_factors(bias, energy=0.9)
    assert found.ranks == expected.ranks
    assert torch.allclose(product(found), product(expected), atol=1e-5)
    assert torch.allclose(spectrum(bias), values, atol=1e-6)


def test_an_svd_that_never_converges_is_an_error(monkeypatch: pytest.MonkeyPatch):
    for name in ("svd", "eigh"):
        monkeypatch.setattr(torch.linalg, name, failing(99, None))
    with pytest.raises(DecompositionError, match="8 x 8 bias did not converge") as caught:
        svd_factors(gaussian(1, 8, 8))
    assert isinstance(caught.value.__cause__, torch.linalg.LinAlgError)
    assert "exact" in caught.value.hint


def test_an_svd_that_returns_nan_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    bias = gaussian(1, 8, 8)
    expected = svd_factors(bias)
    real, calls = torch.linalg.svd, []

    def nan_once(matrix: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(1)
        u, s, vh = real(matrix, **kwargs)
        return (u, s * float("nan"), vh) if len(calls) == 1 else (u, s, vh)

    monkeypatch.setattr(torch.linalg, "svd", nan_once)
    assert torch.equal(svd_factors(bias).phi_q, expected.phi_q)
    assert len(calls) == 2


def test_singular_values_in_ascending_order_are_sorted(monkeypatch: pytest.MonkeyPatch):
    bias = gaussian(2, 9, 7)
    expected, values = svd_factors(bias, energy=0.8), spectrum(bias)
    real, real_values = torch.linalg.svd, torch.linalg.svdvals

    def ascending(matrix: torch.Tensor, **kwargs: Any) -> Any:
        u, s, vh = real(matrix, **kwargs)
        return u.flip(-1), s.flip(-1), vh.flip(-2)

    monkeypatch.setattr(torch.linalg, "svd", ascending)
    monkeypatch.setattr(torch.linalg, "svdvals", lambda x: real_values(x).flip(-1))
    found = svd_factors(bias, energy=0.8)
    assert found.ranks == expected.ranks
    assert torch.equal(found.phi_k, expected.phi_k)
    assert torch.equal(spectrum(bias), values)


def test_nearly_rank_one_of_huge_range():
    powers = 50.0 ** torch.arange(1, 17, dtype=torch.float64)
    bias = powers.expand(16, 16)[None] + gaussian(1, 16, 16)
    term = svd_factors(bias)
    assert term.phi_q.isfinite().all() and term.phi_k.isfinite().all()
    assert measure(bias, term).energy.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("seed", range(3))
def test_a_card_gives_the_same_factors(seed: int):
    bias = gaussian(2, 3, 40, 24, seed=seed)
    bias[0, 0], bias[1, 1] = 0, torch.eye(40, 24)  # repeated singular values, too
    cpu, card = svd_factors(bias, energy=0.95), svd_factors(bias.cuda(), energy=0.95)
    assert card.phi_q.is_cuda and card.phi_k.is_cuda
    assert card.ranks == cpu.ranks
    assert card.split == cpu.split
    distinct = [(0, 1), (0, 2), (1, 0), (1, 2)]  # the identity's vectors are not unique
    for at in distinct:
        assert torch.allclose(product(card)[at].cpu(), product(cpu)[at], atol=1e-4)
        assert torch.allclose(card.phi_k[at].cpu(), cpu.phi_k[at], atol=1e-4)
    assert torch.allclose(spectrum(bias.cuda()).cpu(), spectrum(bias), atol=1e-10)


# -- filling -------------------------------------------------------------------------------


def test_filling_uses_columns_that_cost_nothing():
    bias = gaussian(2, 64, 64)
    for energy, bucket in ((0.3, 16), (0.7, 32)):
        least = svd_factors(bias, energy=energy)
        full = svd_factors(bias, energy=energy, fill=True)
        assert max(least.ranks) < bucket
        assert [r + 2 * full.split for r in full.ranks] == [bucket] * 2
        assert full.split == least.split
        assert measure(bias, full).energy.min() > measure(bias, least).energy.max()


def test_filling_respects_the_cap_and_the_matrix():
    assert svd_factors(gaussian(1, 64, 64), energy=0.3, max_rank=9, fill=True).ranks == (9,)
    three = gaussian(1, 64, 3) @ gaussian(1, 3, 64, seed=1)
    assert max(svd_factors(three, energy=0.5, fill=True).ranks) == 3
    assert svd_factors(torch.zeros(1, 8, 8), fill=True).ranks == (0,)
    assert svd_factors(gaussian(1, 9, 9), energy=0.5, fill=True).ranks[0] <= 8


@pytest.mark.parametrize(
    ("needed", "split", "most", "rank"),
    [(9, 0, 16, 16), (9, 2, 16, 12), (15, 1, 32, 30), (3, 5, 16, 6), (0, 0, 0, 0), (20, 0, 24, 24)],
)
def test_filled_rank(needed: int, split: int, most: int, rank: int):
    """(15 + 2 columns need 32 anyway; 3 columns, all split, take 9 of 16.)"""
    assert filled_rank(needed, split, most) == rank


def test_many_small_matrices_are_decomposed_by_their_eigenvectors_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: the same ranks, and the same matrices to the rounding of fp32 factors."""
    bias = 5.0 + torch.stack(
        [of_rank(8, n=36, m=36, heads=2) + 0.01 * gaussian(2, 36, 36, seed=s) for s in range(4)]
    )
    plain = truncated_svd(bias, energy=0.999)
    monkeypatch.setattr(
        "flashbias_convert.decompose.robust_svd._is_many_small", lambda matrix: True
    )
    other = truncated_svd(bias, energy=0.999)
    assert other.needed == plain.needed
    expected, found = (x.term.dense(36, 36, dtype=torch.float64) for x in (plain, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(bias.abs().max()))

"""ALiBi: signs, positions, and flash-attention's formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flashbias_convert.terms import Alibi

SLOPES = torch.tensor([0.5, 0.25, 3.0])


@given(st.integers(1, 7), st.integers(1, 9))
def test_the_symmetric_form_is_that_of_flash_attention(n: int, m: int) -> None:
    """Its documentation: a bias of -alibi_slope * |i + seqlen_k - seqlen_q - j|."""
    dense = Alibi(slopes=SLOPES, symmetric=True).dense(n, m)
    assert dense.shape == (3, n, m)
    for h, slope in enumerate(SLOPES.tolist()):
        for i in range(n):
            for j in range(m):
                assert dense[h, i, j] == -slope * abs(i + m - n - j)


@given(st.integers(1, 7), st.integers(0, 5))
@example(128, 0)
def test_the_plain_form_equals_it_where_a_causal_mask_lets_see(n: int, past: int) -> None:
    m = n + past
    plain, symmetric = (Alibi(slopes=SLOPES, symmetric=s).dense(n, m) for s in (False, True))
    visible = torch.ones(n, m, dtype=torch.bool).tril(past)
    assert torch.equal(plain[:, visible], symmetric[:, visible])
    assert (plain[:, ~visible] > 0).all()


def test_the_plain_form_is_slope_times_key_position_up_to_a_constant_per_row() -> None:
    dense = Alibi(slopes=SLOPES).dense(4, 6)
    for h, slope in enumerate(SLOPES.tolist()):
        for i in range(4):
            rest = [float(dense[h, i, j]) - slope * j for j in range(6)]
            assert rest == [rest[0]] * 6


def test_nearer_keys_score_higher() -> None:
    plain = Alibi(slopes=SLOPES).dense(5, 5)
    assert (plain.diff(dim=-1) > 0).all(), "under a causal mask, later is nearer"
    symmetric = Alibi(slopes=SLOPES, symmetric=True).dense(5, 5)
    assert (symmetric.argmax(-1) == torch.arange(5)).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_decoding_one_query_gives_its_row_of_the_whole(symmetric: bool) -> None:
    term = Alibi(slopes=SLOPES, symmetric=symmetric)
    whole = term.dense(6, 6)
    for at in range(6):
        assert torch.equal(term.dense(1, 6, query_start=at), whole[:, at : at + 1])
        assert torch.equal(term.dense(1, at + 1), whole[:, at : at + 1, : at + 1])


@pytest.mark.parametrize("symmetric", [False, True])
def test_left_padding_shifts_positions_per_sequence(symmetric: bool) -> None:
    """Two sequences of 5 and 3 tokens in 5 places: real tokens see what they see unpadded."""
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    term = Alibi(slopes=SLOPES, pos_q=positions, pos_k=positions, symmetric=symmetric)
    dense = term.dense(5, 5)
    assert dense.shape == (2, 3, 5, 5)
    assert term.batch_shape() == (2,)
    unpadded = Alibi(slopes=SLOPES, symmetric=symmetric)
    assert torch.equal(dense[0], unpadded.dense(5, 5))
    assert torch.equal(dense[1, :, 2:, 2:], unpadded.dense(3, 3))


def test_positions_of_the_keys_alone_are_measured_from_where_the_queries_start() -> None:
    keys = torch.tensor([7, 1, 4])
    dense = Alibi(slopes=torch.tensor([2.0]), pos_k=keys).dense(2, 3, query_start=10)
    assert dense.tolist() == [[[-6.0, -18.0, -12.0], [-8.0, -20.0, -14.0]]]


def test_slopes_may_differ_in_the_batch() -> None:
    slopes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    term = Alibi(slopes=slopes)
    dense = term.dense(2, 4)
    assert dense.shape == (3, 2, 2, 4) and term.batch_shape() == (3,)
    for b in range(3):
        assert torch.equal(dense[b], Alibi(slopes=slopes[b]).dense(2, 4))


def test_float64_is_exact_far_from_the_start() -> None:
    """0.1 in fp32 times a position above 2**24, which fp32 would round."""
    slope, far = torch.tensor([0.1]), 2**24 + 1
    term = Alibi(slopes=slope, pos_q=torch.tensor([0]), pos_k=torch.tensor([far]))
    dense = term.dense(1, 1, dtype=torch.float64)
    assert dense.dtype == torch.float64
    assert dense.item() == float(slope) * far


def test_neither_slopes_nor_positions_are_rounded() -> None:
    positions = torch.tensor([0, 2049, 4097], dtype=torch.int32)
    term = Alibi(slopes=SLOPES, pos_q=positions, pos_k=positions)
    half = term.to(dtype=torch.bfloat16)
    assert half.slopes.dtype == torch.float32
    assert half.pos_q is not None and half.pos_q.dtype == torch.int32
    assert torch.equal(half.dense(3, 3), term.dense(3, 3))


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="slopes must have shape"):
        Alibi(slopes=torch.tensor(1.0))
    for name in ("pos_q", "pos_k"):
        with pytest.raises(TypeError, match=f"{name} must hold integers, got torch.float32"):
            Alibi(slopes=SLOPES, **{name: torch.arange(3.0)})
        with pytest.raises(TypeError, match=f"{name} must hold integers, got torch.bool"):
            Alibi(slopes=SLOPES, **{name: torch.ones(3, dtype=torch.bool)})
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            Alibi(slopes=SLOPES, **{name: torch.tensor(3)})
    term = Alibi(slopes=SLOPES, pos_q=torch.arange(3), pos_k=torch.arange(4))
    with pytest.raises(ValueError, match="alibi: pos_q is for 3 queries, the call has 2"):
        term.dense(2, 4)
    with pytest.raises(ValueError, match="alibi: pos_k is for 4 keys, the call has 5"):
        term.dense(3, 5)

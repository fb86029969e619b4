"""Sums of terms: their meaning, their heads, their moves and their state."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashbias_convert.terms import (
    TERM_KINDS,
    Alibi,
    Dense,
    KeyBias,
    LowRank,
    RelativeTable,
    ScoreBias,
    Term,
)

from .builders import BUILDERS, Case, build, cases

KINDS = sorted(BUILDERS)


def test_every_kind_of_term_is_tested() -> None:
    assert set(BUILDERS) == set(TERM_KINDS)
    for kind in KINDS:
        assert type(build(kind)) is TERM_KINDS[kind]


# -- meaning -------------------------------------------------------------------------------


@given(cases())
def test_dense_is_the_sum_of_what_each_term_adds_to_its_heads(case: Case) -> None:
    dense = case.dense()
    batch = torch.broadcast_shapes((), *(t.batch_shape() for t in case.bias.terms))
    assert dense.shape == (*batch, case.bias.num_heads, case.n, case.m)
    for head in range(case.bias.num_heads):
        expected = torch.zeros(*batch, case.n, case.m)
        for term in case.bias.terms:
            if term.heads is not None and head not in term.heads:
                continue
            own = term.dense(case.n, case.m)
            at = head if term.heads is None else term.heads.index(head)
            expected = expected + own[..., at if own.shape[-3] > 1 else 0, :, :]
        assert torch.equal(dense[..., head, :, :], expected)


@given(cases())
def test_batch_shape_is_that_of_dense(case: Case) -> None:
    assert case.bias.batch_shape() == tuple(case.dense().shape[:-3])


@given(cases(max_terms=2), st.integers(0, 9))
def test_adding_biases_adds_their_matrices(case: Case, seed: int) -> None:
    heads = case.bias.num_heads
    term = build("dense", n=case.n, m=case.m, own=heads, seed=seed)
    other = ScoreBias((term,), heads)
    assert torch.equal(case.dense(case.bias + other), case.dense() + case.dense(other))


@pytest.mark.parametrize("kind", KINDS)
def test_float64_results_are_float64_and_equal(kind: str) -> None:
    bias = ScoreBias((build(kind, gated=True),), 3)
    wide = bias.dense(4, 5, dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, bias.dense(4, 5).double())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_scale_multiplies_rows(kind: str) -> None:
    term = build(kind, gated=True, batch=(2,))
    plain = dataclasses.replace(term, row_scale=None).dense(4, 5)
    dense = term.dense(4, 5)
    assert term.row_scale is not None and dense.shape == (2, 3, 4, 5)
    for h in range(3):
        for i in range(4):
            own = plain[:, h if plain.shape[1] > 1 else 0, i]
            assert torch.equal(dense[:, h, i], term.row_scale[:, h, i, None] * own)


def test_a_bias_without_terms_is_zero() -> None:
    empty = ScoreBias((), 3)
    assert torch.equal(empty.dense(2, 4), torch.zeros(3, 2, 4))
    assert empty.batch_shape() == () and empty.device == torch.device("cpu")
    assert not empty.requires_grad


def test_gradients_reach_the_tensors_of_terms() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    bias = ScoreBias((KeyBias(values=values),), 2)
    assert bias.requires_grad
    bias.dense(4, 3).sum().backward()
    assert values.grad is not None and (values.grad == 4).all()


# -- heads ---------------------------------------------------------------------------------


@given(cases(), st.data())
def test_selecting_heads_commutes_with_dense(case: Case, data: st.DataObject) -> None:
    """In any order, with repeats, and twice in a row."""
    some = st.lists(st.integers(0, case.bias.num_heads - 1), min_size=1, max_size=4)
    wanted = data.draw(some)
    chosen = case.bias.select_heads(wanted)
    assert chosen.num_heads == len(wanted)
    expected = case.dense()[..., wanted, :, :]
    assert torch.equal(case.dense(chosen).expand_as(expected), expected)
    again = chosen.select_heads([len(wanted) - 1])
    assert torch.equal(
        case.dense(again).expand_as(expected[..., -1:, :, :]), expected[..., -1:, :, :]
    )


def test_heads_are_renumbered_in_the_order_asked_for() -> None:
    values = torch.tensor([[10.0], [20.0]])
    bias = ScoreBias((KeyBias(values=values, heads=(3, 1)),), 4)
    (term,) = bias.select_heads([0, 1, 3]).terms
    assert isinstance(term, KeyBias)
    assert term.heads == (1, 2) and term.values.tolist() == [[20.0], [10.0]]
    (every,) = bias.select_heads([1, 3]).terms
    assert every.heads is None


def test_terms_of_other_heads_are_left_out() -> None:
    one, two = (KeyBias(values=torch.ones(1, 1), heads=(h,)) for h in (0, 1))
    assert len(ScoreBias((one, two), 2).select_heads([1]).terms) == 1
    assert one.select_heads([1]) is None


def test_what_heads_share_stays_shared() -> None:
    phi_q, phi_k = torch.ones(1, 4, 2), torch.arange(24.0).view(3, 4, 2)
    term = LowRank(phi_q=phi_q, phi_k=phi_k, row_scale=torch.ones(1, 4))
    chosen = term.select_heads([2, 1])
    assert isinstance(chosen, LowRank) and chosen.row_scale is not None
    assert chosen.phi_q is phi_q and chosen.row_scale.shape == (1, 4)
    assert torch.equal(chosen.phi_k, phi_k[[2, 1]])


def test_heads_that_do_not_exist_are_refused() -> None:
    bias = ScoreBias((), 2)
    with pytest.raises(ValueError, match=r"heads \[2, -1\] do not exist, this bias has 2"):
        bias.select_heads([0, 2, -1])


# -- moves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_reaches_only_what_may_be_rounded(kind: str, dtype: torch.dtype) -> None:
    bias = ScoreBias((build(kind, gated=True),), 3)
    before = dict(bias.named_tensors())
    after = dict(bias.to("cpu", dtype).named_tensors())
    assert list(before) == list(after)
    follow = {"dense.bias", "axial.rel_h", "axial.rel_w"}
    for name, tensor in after.items():
        assert tensor.dtype == (dtype if name in follow else before[name].dtype), name


@given(cases())
def test_a_move_keeps_everything_else(case: Case) -> None:
    moved = case.bias.to("cpu")
    assert moved.spec() == case.bias.spec()
    assert torch.equal(case.dense(moved), case.dense())
    assert case.bias.to("meta").spec() == case.bias.spec()


def test_a_cast_leaves_the_original_alone() -> None:
    bias = ScoreBias((build("dense"),), 3)
    bias.to(dtype=torch.float16)
    assert all(t.dtype == torch.float32 for _, t in bias.named_tensors())


# -- state ---------------------------------------------------------------------------------


def stored(bias: ScoreBias) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Specification and tensors as they come back from a file."""
    spec = json.loads(json.dumps(bias.spec(), allow_nan=False))
    tensors = {name: t.clone().contiguous() for name, t in bias.named_tensors()}
    return spec, safetensors.torch.load(safetensors.torch.save(tensors))


@given(cases())
def test_state_that_was_stored_gives_an_equal_bias(case: Case) -> None:
    spec, tensors = stored(case.bias)
    again = ScoreBias.from_state(spec, tensors)
    assert again.spec() == case.bias.spec()
    assert torch.equal(case.dense(again), case.dense())
    for new, old in zip(again.terms, case.bias.terms, strict=True):
        assert new.static() == old.static() and new.heads == old.heads


@given(cases())
def test_an_empty_bias_from_the_specification_has_its_shapes_and_dtypes(case: Case) -> None:
    spec, _ = stored(case.bias)
    for device in ("cpu", "meta"):
        empty = ScoreBias.empty_from_spec(spec, device=device)
        assert empty.spec() == case.bias.spec()
        assert all(t.device.type == device for _, t in empty.named_tensors())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_every_float_dtype_survives(dtype: torch.dtype) -> None:
    bias = ScoreBias((Dense(bias=torch.ones(1, 2, 2, dtype=dtype)),), 1)
    assert [t.dtype for _, t in ScoreBias.from_state(*stored(bias)).named_tensors()] == [dtype]
    empty = ScoreBias.empty_from_spec(bias.spec())
    assert [t.dtype for _, t in empty.named_tensors()] == [dtype]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_every_integer_dtype_survives(dtype: torch.dtype) -> None:
    codes = torch.tensor([0, 1], dtype=dtype)
    bias = ScoreBias((RelativeTable(table=torch.ones(1, 3), u=codes, v=codes),), 1)
    dtypes = [torch.float32, dtype, dtype]
    assert [t.dtype for _, t in ScoreBias.from_state(*stored(bias)).named_tensors()] == dtypes
    empty = ScoreBias.empty_from_spec(bias.spec())
    assert [t.dtype for _, t in empty.named_tensors()] == dtypes


def test_terms_of_one_kind_have_names_of_their_own() -> None:
    alibi, first, second = build("alibi"), build("key_bias"), build("key_bias", seed=1)
    bias = ScoreBias((first, alibi, second), 3)
    assert bias.term_names() == ["key_bias", "alibi", "key_bias_2"]
    assert [name for name, _ in bias.named_tensors()] == [
        "key_bias.values",
        "alibi.slopes",
        "key_bias_2.values",
    ]
    again = ScoreBias.from_state(*stored(bias))
    assert torch.equal(again.dense(4, 5), bias.dense(4, 5))


def test_tensors_that_are_absent_stay_absent() -> None:
    (term,) = ScoreBias.from_state(*stored(ScoreBias((build("alibi"),), 3))).terms
    assert isinstance(term, Alibi)
    assert term.pos_q is None and term.pos_k is None and term.row_scale is None


def test_further_tensors_do_no_harm() -> None:
    spec, tensors = stored(ScoreBias((build("dense"),), 3))
    assert ScoreBias.from_state(spec, tensors | {"other.weight": torch.ones(1)}).spec() == spec


def test_an_unknown_kind_is_refused() -> None:
    spec, tensors = stored(ScoreBias((build("dense"),), 3))
    spec["terms"][0]["kind"] = "spline"
    with pytest.raises(ValueError, match="unknown kind of term 'spline'"):
        ScoreBias.from_state(spec, tensors)


def test_missing_tensors_are_named() -> None:
    spec, tensors = stored(ScoreBias((build("low_rank"),), 3))
    del tensors["low_rank.phi_k"]
    with pytest.raises(ValueError, match=r"tensors \['low_rank.phi_k'\] .* are missing"):
        ScoreBias.from_state(spec, tensors)


def test_codes_that_are_no_integers_are_refused() -> None:
    spec, tensors = stored(ScoreBias((build("relative_table"),), 3))
    tensors["relative_table.u"] = tensors["relative_table.u"].float()
    with pytest.raises(TypeError, match=r"u must hold integers, got torch\.float32"):
        ScoreBias.from_state(spec, tensors)


def test_tensors_of_another_number_of_heads_are_refused() -> None:
    spec, tensors = stored(ScoreBias((build("dense"),), 3))
    tensors["dense.bias"] = tensors["dense.bias"][:2]
    with pytest.raises(ValueError, match="dense has 2 heads, expected 1 or 3"):
        ScoreBias.from_state(spec, tensors)


def test_an_unknown_dtype_is_refused() -> None:
    spec, _ = stored(ScoreBias((build("dense"),), 3))
    spec["terms"][0]["tensors"]["bias"]["dtype"] = "float4"
    with pytest.raises(ValueError, match="unknown dtype 'float4'"):
        ScoreBias.empty_from_spec(spec)


# -- what does not fit ---------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [0, -1])
def test_the_number_of_heads_is_positive(num_heads: int) -> None:
    with pytest.raises(ValueError, match="num_heads must be positive"):
        ScoreBias((), num_heads)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (build("dense", own=2), "dense has 2 heads, expected 1 or 3"),
        (build("key_bias", own=3, heads=(0, 1)), "key_bias has 3 heads, expected 1 or 2"),
        (build("dense", own=2, heads=(1, 1)), r"dense: heads \(1, 1\) are not distinct"),
        (build("dense", own=2, heads=(0, 3)), r"dense: heads \(0, 3\) are .* not below 3"),
        (build("dense", own=2, heads=(-1, 0)), r"dense: heads \(-1, 0\)"),
        (
            KeyBias(values=torch.ones(3, 5), row_scale=torch.ones(4)),
            r"key_bias: row_scale must have shape \(\*batch, H, N\), got \(4,\)",
        ),
        (
            KeyBias(values=torch.ones(3, 5), row_scale=torch.ones(2, 4)),
            "key_bias: tensors disagree on the number of heads",
        ),
    ],
)
def test_terms_for_other_heads_are_refused(term: Term, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreBias((term,), 3)


def test_biases_of_other_numbers_of_heads_cannot_be_added() -> None:
    with pytest.raises(ValueError, match="a bias of 2 heads to one of 3"):
        ScoreBias((), 3) + ScoreBias((), 2)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"alibi", "diagonal", "key_bias"}))
def test_a_call_of_another_size_is_refused(kind: str) -> None:
    bias = ScoreBias((build(kind),), 3)
    with pytest.raises(ValueError, match=f"{kind}: .* is for 4 queries, the call has 3"):
        bias.dense(3, 5)
    with pytest.raises(ValueError, match=f"{kind}: .* is for 5 keys, the call has 4"):
        bias.dense(4, 4)

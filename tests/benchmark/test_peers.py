"""Peers compute the same attention; what is fast and wrong is called wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.attention import flashbias_attention
from flashbias_convert.benchmark import peers
from flashbias_convert.benchmark.calls import AttentionCall
from flashbias_convert.benchmark.judge import AttentionReference
from flashbias_convert.benchmark.rows import Timing
from flashbias_convert.benchmark.sites import site_rows
from flashbias_convert.terms import ScoreBias
from tests.support import assert_parity

from .calls import CALLS, alibi, draw, low_rank, make_call


class NotCompiled(peers.Flex):
    """FlexAttention as torch computes it without a compiler."""

    def __init__(self) -> None:
        self.attend, self._scaled = peers._flex, peers.scaled


def sdpa(call: AttentionCall) -> Tensor:
    return peers.sdpa_attention(call, peers.dense_mask(call))(call.q, call.k, call.v)


def flex(call: AttentionCall) -> Tensor:
    bias = peers.dense_mask(call, with_causal=not peers.skips_blocks(call))
    return peers.flex_attention(call, bias, NotCompiled())(call.q, call.k, call.v)


@pytest.mark.parametrize(
    ("name", "peer"),
    [*((name, sdpa) for name in CALLS), ("types of windows", flex), ("shared keys", flex)],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_peer_computes_what_the_reference_computes(name: str, peer: Any) -> None:
    call = CALLS[name]()
    args = call.args
    truth = flashbias_attention(
        call.q.double(), call.k.double(), call.v.double(), call.bias,
        scale=args.scale, causal=args.causal, key_mask=args.key_mask, cosine=args.cosine,
        backend="eager",
    )  # fmt: skip
    plain = peers.plain_attention(call)
    assert_parity(peer(call), plain, truth)


def test_without_a_bias_causality_stays() -> None:
    call = CALLS["causal"]()
    out = peers.sdpa_attention(call, None)(call.q, call.k, call.v)
    bare = AttentionCall(call.q, call.k, call.v, ScoreBias((), 4), call.args)
    truth = flashbias_attention(
        call.q.double(), call.k.double(), call.v.double(), causal=True, backend="eager"
    )
    assert_parity(out, peers.plain_attention(bare), truth)


def test_rows_of_a_mask_are_aligned() -> None:
    mask = peers.dense_mask(CALLS["low rank"]())
    assert mask.shape == (4, 21, 21) and mask.stride() == (21 * 32, 32, 1)


def test_causality_is_left_to_a_block_mask_where_that_is_possible() -> None:
    assert peers.skips_blocks(CALLS["causal"]()) and not peers.skips_blocks(CALLS["low rank"]())
    placed = make_call(low_rank(), causal=True, query_start=torch.tensor([0, 0]))
    assert not peers.skips_blocks(placed) and peers.block_mask(placed) is None


# -- judging -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["windows", "shared keys", "padded"])
def test_a_small_fault_of_any_head_is_seen(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name]()
    call = AttentionCall(call.q.to(dtype), call.k.to(dtype), call.v.to(dtype), call.bias, call.args)
    reference = AttentionReference.of(call)
    out = sdpa(call)
    assert reference.judge(out).passed
    for head in range(4):
        spoilt = out.clone()
        spoilt[..., head, 3, 0] += 0.1
        found = reference.judge(spoilt)
        assert not found.passed and found.verdict == "exceeds rounding"
        assert "rounding allows" in found.reason
    spoilt = out.clone()
    spoilt[0].flatten()[0] = float("nan")
    assert reference.judge(spoilt).verdict == "not finite"
    assert reference.judge(out[..., :-1, :]).verdict == "not comparable"


def test_queries_that_see_nothing_are_not_compared() -> None:
    real = torch.arange(21).expand(2, 21) >= torch.tensor([[0], [6]])
    call = make_call(alibi(), causal=True, key_mask=real)
    reference = AttentionReference.of(call)
    out = sdpa(call)
    assert reference.judge(out).passed
    padding, seen = out.clone(), out.clone()
    padding[1, :, :6] = float("nan")
    assert reference.judge(padding).passed
    seen[1, :, 6] += 0.1
    assert not reference.judge(seen).passed


def test_a_reference_looks_at_the_heads_that_memory_allows(monkeypatch: Any) -> None:
    monkeypatch.setattr("flashbias_convert.benchmark.judge._MOST_CELLS", 2 * 21 * 21)
    reference = AttentionReference.of(CALLS["shared keys"]())
    assert reference.heads == [0, 2] and reference.truth.shape == (1, 2, 21, 10)
    assert reference.judge(sdpa(CALLS["shared keys"]())).passed


def test_rows_that_are_wrong_or_fail_have_no_ratio(monkeypatch: Any) -> None:
    call = CALLS["low rank"]()

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("so many GiB")

    monkeypatch.setattr("flashbias_convert.benchmark.sites.sdpa_attention", fails)
    timing = Timing(torch.device("cpu"), 2, no_compile="not here")
    wrong = draw(*call.q.shape, seed=9)
    rows = {row.name: row for row in site_rows(call, lambda: wrong, timing)}
    assert rows[peers.OURS].status == "wrong" and rows[peers.OURS].median_ms is None
    assert rows[peers.OURS].times is not None
    assert (rows[peers.SDPA].status, rows[peers.SDPA].reason) == ("failed", "out of memory")
    assert (rows[peers.FLEX].status, rows[peers.FLEX].reason) == ("not measured", "not here")
    assert all(not row.ratios for row in rows.values())


def test_without_room_for_a_reference_times_are_shown_and_not_judged(monkeypatch: Any) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AttentionReference, "of", fails)
    call = CALLS["low rank"]()
    timing = Timing(torch.device("cpu"), 2, no_compile="not here")
    first, second, *_ = site_rows(call, lambda: call.v * float("nan"), timing)
    assert (first.status, first.verdict) == ("wrong", "not finite")
    assert (second.status, second.verdict) == ("measured", "not judged: out of memory")


def test_a_bias_is_rounded_alike_for_whoever_hides_keys_otherwise() -> None:
    """ALiBi in half precision: where hidden keys count for the largest of a row, those that are
    visible are far from it, and lose their digits."""
    call = make_call(alibi(), n=256, dtype=torch.bfloat16, causal=True)
    seen = torch.ones(256, 256, dtype=torch.bool).tril()
    with_causal, without = (peers.dense_mask(call, with_causal=own) for own in (True, False))
    assert torch.equal(with_causal[..., seen], without[..., seen])
    assert without.isfinite().all() and with_causal[..., ~seen].isneginf().all()

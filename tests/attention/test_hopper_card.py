"""The kernel for Hopper on such a card: as near to float64 as the usual kernel, whatever comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import Alibi, KeyBias, LowRank, RelativeTable, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.hopper import rules

from .cases import Inputs, check
from .conftest import HAS_GPU
from .test_card import assert_replays_follow

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_GPU and rules.is_there(CUDA)), reason="needs a Hopper and its version of Triton"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [(64, BF16), (128, BF16), (128, FP16)]


@pytest.fixture(autouse=True, params=[1, 2**31], ids=["in turns", "beside"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All lengths are served, and how many launches were is told; none goes elsewhere.

    Tests run once more with heads of 64 on the form that serves short calls.
    """
    call = getattr(request.node, "callspec", None)
    d = 64 if call is None else call.params.get("d", 64)
    if d != 64 and request.param != 1:
        pytest.skip("there is one form")
    from flashbias_convert.attention.hopper.plan import HopperPlan

    ran: list[int] = []
    run = HopperPlan.run

    def counted(self: Any, *args: Any) -> None:
        ran.append(1)
        run(self, *args)
        assert rules.works()
        # Triton's launcher is as `DescribedLaunch` knows it
        own = [made for name, made in self._launches.items() if name != "lengths"]
        assert all(made is not None and made._encode is not None for made in own)

    monkeypatch.setattr(rules, "SHORTEST", dict.fromkeys(rules.SHORTEST, 1))
    monkeypatch.setattr(rules, "FEWEST_SCORES", 1)
    monkeypatch.setattr(rules, "FEWEST_OF_ONE_PASS", 1)
    monkeypatch.setattr(rules, "TURNS_FROM", request.param)
    monkeypatch.setattr(rules, "REACH_FROM", 250)
    monkeypatch.setattr(launch, "_PLANS", {})
    monkeypatch.setattr(HopperPlan, "run", counted)
    yield ran
    assert ran


def inputs(d: int, dtype: torch.dtype, n: int, **sizes: Any) -> Inputs:
    return Inputs(CUDA, dtype, n=n, m=n, d=d, dv=d, **{"batch": (2,), "heads": 3, **sizes})


def key_values(x: Inputs) -> Tensor:
    """Rows that the card can copy have multiples of four numbers; others go elsewhere."""
    return 2 * x.normal(x.heads, x.n)


def usual(*args: Any, **kwargs: Any) -> Tensor:
    """The other kernel's result."""
    shortest = dict.fromkeys(rules.SHORTEST, 2**31)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "SHORTEST", shortest)
        patch.setattr(launch, "_PLANS", {})
        return flashbias_attention(*args, backend="triton", **kwargs)


@pytest.mark.parametrize("n", [1, 40, 64, 127, 128, 129, 192, 255, 256, 300, 577, 1025])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_every_length(d: int, dtype: torch.dtype, n: int) -> None:
    x = inputs(d, dtype, n)
    check(x, None, "triton")
    check(x, x.bias(x.low_rank(7, split=0)), "triton", scale=0.3)
    check(x, None, "triton", causal=True)
    check(x, x.bias(x.low_rank(7, split=0)), "triton", scale=0.3, causal=True)
    check(x, x.bias(x.alibi()), "triton", causal=True)
    check(x, x.bias(KeyBias(values=key_values(x))), "triton", scale=0.3)
    for step in (1, -1):
        check(x, x.bias(x.distances(step)), "triton", scale=0.3)
        check(x, x.bias(x.distances(step)), "triton", scale=0.3, causal=True)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 90, 200, 333, 1100])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("causal", [False, True])
def test_tables_by_distance_in_half_precision(causal: bool, step: int, n: int) -> None:
    x = inputs(64, FP16, n)
    check(x, x.bias(x.distances(step)), "triton", causal=causal)


def test_tables_that_heads_share_and_codes_of_any_sign() -> None:
    x = inputs(64, BF16, 333)
    one = x.distances(1)
    moved = dataclasses.replace(one, u=one.u - 900, v=one.v + 900)
    check(x, x.bias(moved), "triton")
    check(x, x.bias(dataclasses.replace(one, table=one.table[1:2])), "triton")


@pytest.mark.parametrize("slope", [-0.1, 0.0, 1e-3, 0.3, 4.0, 300.0])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_alibi_reaches_as_far_as_it_has_weight(
    d: int, dtype: torch.dtype, size: float, slope: float
) -> None:
    """A call so long that it skips keys where slopes are steep, and scores small."""
    x = inputs(d, dtype, 1400)
    x.k = x.k * size
    slopes = torch.tensor([slope, 0.02, 2 * slope], device=CUDA)
    check(x, x.bias(Alibi(slopes=slopes)), "triton", causal=True)


def test_no_key_is_skipped_that_has_weight() -> None:
    """One far key, whose score is as large as the lengths allow; those of all others are minus it.

    It outweighs even the query's own key. If keys were taken to be no better than zero, all that
    are farther away than some 900 tokens would be skipped.
    """
    x = inputs(64, BF16, 1400)
    along = x.normal(*x.k.shape[:2], 1, 64).sign().to(BF16) * 4.25
    x.k = (-along).expand(x.q.shape).clone()
    x.k[:, :, 3] = along[:, :, 0]
    x.q[:, :, 1300] = along[:, :, 0]
    slopes = torch.full((x.heads,), 0.2, device=CUDA)
    bias = x.bias(Alibi(slopes=slopes))
    check(x, bias, "triton", causal=True)
    out = flashbias_attention(x.q, x.k, x.v, bias, causal=True, backend="triton")
    torch.testing.assert_close(out[:, :, 1300], x.v[:, :, 3], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lead", [(3,), (1,), (2, 3), (2, 1), (1, 3)])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_a_bias_per_key_of_any_shape(d: int, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    x = inputs(d, dtype, 300)
    values = x.normal(*lead, 300)
    values[..., 17:140] = float("-inf")
    check(x, x.bias(KeyBias(values=values)), "triton")


def test_keys_that_are_all_hidden_give_zeros() -> None:
    x = inputs(64, BF16, 300)
    values = key_values(x)
    values[1] = float("-inf")
    out = flashbias_attention(x.q, x.k, x.v, x.bias(KeyBias(values=values)), backend="triton")
    assert (out[:, 1] == 0).all() and out.isfinite().all()
    torch.testing.assert_close(out, usual(x.q, x.k, x.v, x.bias(KeyBias(values=values))),
                               rtol=2e-2, atol=2e-2)  # fmt: skip


def test_a_position_behind_the_first_goes_to_the_usual_kernel() -> None:
    x = inputs(64, BF16, 300)
    bias = x.bias(x.alibi())
    check(x, bias, "triton", causal=True)
    options = {"causal": True, "query_start": 40}
    out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton", **options)
    assert torch.equal(out, usual(x.q, x.k, x.v, bias, **options))


@pytest.mark.parametrize(
    ("d", "dtype", "rank"),
    [(*kind, rank) for kind in KINDS for rank in (1, 16, 17, 32, 64, 128)
     if rank <= max(rules.COLUMNS[kind[0]])],
)  # fmt: skip
def test_every_number_of_columns(d: int, dtype: torch.dtype, rank: int) -> None:
    x = inputs(d, dtype, 333)
    check(x, x.bias(x.low_rank(rank, split=0)), "triton")
    check(x, x.bias(x.low_rank(rank, split=0)), "triton", causal=True)


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_columns_in_two_parts(d: int, dtype: torch.dtype, split: int) -> None:
    x = inputs(d, dtype, 300)
    check(x, x.bias(x.low_rank(5, split=split)), "triton")


@pytest.mark.parametrize("n", [300, 1300])
@pytest.mark.parametrize("rise", [-1e4, -300.0, -30.0, 30.0, 300.0, 1e4])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_levels_of_the_first_tile_that_are_no_good(
    d: int, dtype: torch.dtype, rise: float, n: int
) -> None:
    """A stretch of keys is far above all others, or below, and so are all but the first."""
    x = inputs(d, dtype, n)
    for stretch in (slice(n - 40, n), slice(0, 130), slice(130, 140)):
        phi_k = torch.zeros(x.heads, n, 1, device=CUDA)
        phi_k[:, stretch] = rise / 16
        term = LowRank(phi_q=torch.full((x.heads, n, 1), 16.0, device=CUDA), phi_k=phi_k, split=0)
        check(x, x.bias(term), "triton")
        check(x, x.bias(term), "triton", causal=True)
        check(x, x.bias(KeyBias(values=16.0 * phi_k[..., 0])), "triton")
        if d == 64:  # steps of a table by distance
            v = torch.arange(n, device=CUDA).int()
            values = torch.zeros(x.heads, 2 * n - 1, device=CUDA)
            values[:, stretch] = rise
            term = RelativeTable.of_codes(values, n - 1 - v, v, 1)
            check(x, x.bias(term), "triton")
            check(x, x.bias(term), "triton", causal=True)


@pytest.mark.parametrize("level", [-2e4, -100.0, 100.0, 2e4])
@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_every_score_is_far_from_zero(d: int, dtype: torch.dtype, level: float) -> None:
    x = inputs(d, dtype, 400)
    phi_k = torch.full((x.heads, x.n, 1), level / 16, device=CUDA)
    term = LowRank(phi_q=torch.full((x.heads, x.n, 1), 16.0, device=CUDA), phi_k=phi_k, split=0)
    check(x, x.bias(term), "triton")
    check(x, x.bias(term), "triton", causal=True)
    check(x, x.bias(KeyBias(values=16.0 * phi_k[..., 0])), "triton")


def test_only_blocks_of_some_heads_are_computed_again() -> None:
    """A long call in which one row of one head needs it."""
    x = inputs(64, BF16, 2000, batch=(3,), heads=8)
    x.k[1, 5, 1900] = 40.0 * x.q[1, 5, 777].sign()
    check(x, None, "triton")
    x.k[1, 5, 100] = 40.0 * x.q[1, 5, 1777].sign()
    check(x, None, "triton", causal=True)
    check(x, x.bias(x.alibi()), "triton", causal=True)


@pytest.mark.parametrize("kind", ["plain", "causal", "alibi", "key bias", "distances"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_shows_where_it_does_elsewhere(
    name: str, value: float, kind: str
) -> None:
    x = inputs(64, BF16, 300)
    getattr(x, name)[1, 2, 200, 5] = value
    terms = {"alibi": Alibi(slopes=torch.full((3,), 0.1, device=CUDA)),
             "key bias": KeyBias(values=key_values(x)), 
             "distances": x.distances(-1)}  # fmt: skip
    bias = x.bias(terms[kind]) if kind in terms else None
    causal = kind in ("causal", "alibi")
    out = flashbias_attention(x.q, x.k, x.v, bias, causal=causal, backend="triton")
    expected = usual(x.q, x.k, x.v, bias, causal=causal)
    if name == "v" and causal:  # before it zero times infinity depends on the tiles
        out, expected = out[:, :, 200:], expected[:, :, 200:]
    assert torch.equal(out.isfinite(), expected.isfinite()) and not out.isfinite().all()
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["packed", "heads first", "one of a batch", "bare"])
def test_layouts(layout: str) -> None:
    x = inputs(64, BF16, 300)
    if layout == "packed":
        x.q, x.k, x.v = (
            t.transpose(1, 2)
            for t in torch.stack([x.q, x.k, x.v], 2).transpose(1, 3).contiguous().unbind(2)
        )
    elif layout == "one of a batch":
        x.q, x.k, x.v = (t[1:] for t in (x.q, x.k, x.v))
        x.batch = (1,)
    elif layout == "bare":
        x.q, x.k, x.v = (t[0] for t in (x.q, x.k, x.v))
        x.batch = ()
    check(x, x.bias(x.low_rank(9, split=0)), "triton")


def test_factors_of_each_batch_entry() -> None:
    x = inputs(64, BF16, 300)
    one = x.low_rank(6, split=0)
    phi_q = torch.stack([one.phi_q, 2 * one.phi_q])
    bias = x.bias(LowRank(phi_q=phi_q, phi_k=one.phi_k, split=0))
    check(x, bias, "triton")


@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_replays_and_repeats_have_the_same_bits(d: int, dtype: torch.dtype) -> None:
    x = inputs(d, dtype, 700)
    for term, causal in (
        (x.low_rank(8, split=0), False),
        (x.low_rank(8, split=0), True),
        (Alibi(slopes=torch.tensor([4.0, 0.5, 0.1], device=CUDA)), True),
        (KeyBias(values=key_values(x)), False),
        *(((x.distances(-1), False), (x.distances(1), True)) if d == 64 else ()),
    ):
        added = PreparedBias(ScoreBias((term,), x.heads))

        def call(added: PreparedBias = added, causal: bool = causal) -> Tensor:
            return flashbias_attention(x.q, x.k, x.v, added, causal=causal, backend="triton")

        first = call()
        assert all(torch.equal(call(), first) for _ in range(100))
        assert_replays_follow(call, x)


def test_a_tensor_that_is_not_aligned_goes_to_the_usual_kernel() -> None:
    x = inputs(64, BF16, 300)
    check(x, None, "triton")
    apart = torch.empty(x.q.numel() + 1, dtype=BF16, device=CUDA)[1:].view(x.q.shape)
    apart.copy_(x.q)
    out = flashbias_attention(apart, x.k, x.v, backend="triton")
    assert torch.equal(out, usual(x.q, x.k, x.v))


def test_a_compiled_call_takes_it() -> None:
    x = inputs(64, BF16, 512)
    for term in (x.low_rank(8, split=0), x.alibi()):
        added = PreparedBias(ScoreBias((term,), x.heads))

        def call(q: Tensor, added: PreparedBias = added) -> Tensor:
            return flashbias_attention(q, x.k, x.v, added, causal=True, backend="triton")

        assert torch.equal(torch.compile(call, fullgraph=True)(x.q), call(x.q))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_entries_share_goes_to_the_usual_kernel(name: str, dim: int) -> None:
    """One batch entry, or one head, for all."""
    x = inputs(64, BF16, 300)
    check(x, None, "triton")
    shared = getattr(x, name).narrow(dim, 0, 1).expand(x.q.shape)
    setattr(x, name, shared)
    check(x, None, "triton")


@pytest.mark.parametrize(("d", "dtype"), KINDS)
def test_rows_whose_scores_are_all_minus_infinity_are_zeros(d: int, dtype: torch.dtype) -> None:
    x = inputs(d, dtype, 400)
    x.k[..., 0] = -1.0
    x.q[1, 2, 7, 0] = float("inf")
    for causal in (False, True):
        out = flashbias_attention(x.q, x.k, x.v, causal=causal, backend="triton")
        expected = usual(x.q, x.k, x.v, causal=causal)
        assert (out[1, 2, 7] == 0).all() and out.isfinite().all()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_a_first_tile_of_minus_infinity_hides_nothing() -> None:
    """Scores beyond the range of fp32 in the first tile, and a strong key behind it."""
    x = inputs(64, BF16, 400)
    x.q[0, 0, :, 0] = 0.0
    x.q[0, 0, 5] = 0.0
    x.q[0, 0, 5, 0] = 2e19
    x.k[0, 0, :, 0] = 0.0
    x.k[0, 0, :128, 0] = -2e19
    x.k[0, 0, 300, 0] = 1e-17
    out = flashbias_attention(x.q, x.k, x.v, backend="triton")
    assert out.isfinite().all()
    expected = usual(x.q, x.k, x.v)
    torch.testing.assert_close(out[0, 0, 5], expected[0, 0, 5], rtol=2e-2, atol=2e-2)


def test_blocks_that_need_no_second_look_keep_their_bits() -> None:
    """More blocks than a card has multiprocessors, so that programs have several."""
    x = inputs(64, BF16, 2048, batch=(4,), heads=8)
    before = flashbias_attention(x.q, x.k, x.v, backend="triton")
    x.q[2, 3, 700] = 40.0 * x.k[2, 3, 1900].sign()
    after = flashbias_attention(x.q, x.k, x.v, backend="triton")
    same = torch.ones(4, 8, 2048, dtype=torch.bool, device=CUDA)
    same[2, 3, 640:768] = False
    assert torch.equal(before[same], after[same])
    check(x, None, "triton")

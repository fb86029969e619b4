"""Which term is taken, for which head, and what the decision says about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashbias_convert.decompose import (
    SHORTEST_N,
    Decomposition,
    choose,
    decompose,
    measure,
    rank_bucket,
    truncations,
)
from flashbias_convert.errors import DecompositionError, UsageError
from flashbias_convert.options import DecomposeOptions

pytestmark = pytest.mark.usefixtures("prices")
N = 48


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def smooth(heads: int = 1, n: int = N) -> torch.Tensor:
    """Low rank, and no function of relative positions."""
    return gaussian(heads, n, 3) @ gaussian(heads, 3, n, seed=1)


def table(heads: int = 1, n: int = N) -> torch.Tensor:
    """A random value per distance: a relative table of high rank."""
    at = torch.arange(n)
    return gaussian(heads, 2 * n - 1, seed=2)[:, at[:, None] - at[None, :] + n - 1]


def noise(heads: int = 1, n: int = N) -> torch.Tensor:
    return gaussian(heads, n, n, seed=3)


def constant(heads: int = 1, n: int = N) -> torch.Tensor:
    return gaussian(heads, n, 1, seed=4).expand(heads, n, n)


def kinds(found: Decomposition) -> list[str]:
    return [d.term for d in found.decisions]


def check_terms(found: Decomposition, bias: torch.Tensor) -> None:
    """Every decision agrees with the terms: their heads, their ranks and their losses."""
    dense = found.bias.dense(*bias.shape[-2:], dtype=torch.float64)
    loss = measure(bias, dense.expand(bias.shape)).worst_over_batch()
    for h, decision in enumerate(found.decisions):
        assert decision.head == h
        assert decision.reason
        assert decision.energy == pytest.approx(float(loss.energy[h]), abs=1e-9)
        assert decision.logit_error_max == pytest.approx(float(loss.logit_error_max[h]), abs=1e-9)
        assert decision.logit_error_rms == pytest.approx(float(loss.logit_error_rms[h]), abs=1e-9)
        assert decision.attention_error == pytest.approx(float(loss.attention_error[h]), abs=1e-9)
        at_work = [t for t in found.bias.terms if h in (t.heads or range(found.bias.num_heads))]
        assert [t.kind for t in at_work] == ([] if decision.term == "none" else [decision.term])
        if decision.term == "low_rank":
            own = h if at_work[0].heads is None else at_work[0].heads.index(h)
            assert decision.rank == at_work[0].head_ranks()[own]
        else:
            assert decision.rank is None
    assert len(found.bias.terms) == len({(t.kind, t.heads) for t in found.bias.terms})


# -- methods -------------------------------------------------------------------------------


def test_svd_truncates_every_head_as_the_paper_does():
    bias = torch.cat([smooth(), table(), noise()])
    found = decompose(bias, DecomposeOptions(method="svd"))
    assert kinds(found) == ["low_rank"] * 3
    assert len(found.bias.terms) == 1
    assert found.bias.terms[0].heads is None
    assert found.decisions[0].rank <= 3 < found.decisions[2].rank
    assert all(d.energy >= 0.99 - 1e-9 for d in found.decisions)
    check_terms(found, bias)


def test_exact_keeps_every_bit():
    bias = torch.cat([smooth(), table(2), constant(), noise(), table()])
    found = decompose(bias, DecomposeOptions(method="exact"))
    assert kinds(found) == [
        "dense", "relative_table", "relative_table", "none", "dense", "relative_table",
    ]  # fmt: skip
    assert [(t.kind, t.heads) for t in found.bias.terms] == [
        ("relative_table", (1, 2, 5)),
        ("dense", (0, 4)),
    ]
    shaped = [0, 1, 2, 4, 5]
    assert torch.equal(found.bias.dense(N, N)[shaped], bias[shaped])
    check_terms(found, bias)


def test_auto_takes_the_cheapest_that_is_good_enough():
    bias = torch.cat([smooth(), table(), constant(), noise()])
    found = decompose(bias, DecomposeOptions())
    # rank 3 costs 1, a small dense bias 5, a table 9, a rank above 32 (padded 64) 6
    assert kinds(found) == ["low_rank", "dense", "none", "dense"]
    assert [t.heads for t in found.bias.terms] == [(0,), (1, 3)]
    assert found.left_alone is None
    check_terms(found, bias)


def test_auto_weighs_by_cost(prices: dict[str | int, float]):
    bias = torch.cat([smooth(), table(), noise()])
    prices |= {"relative_table": 0.5, "dense": 0.9}
    prices |= dict.fromkeys((16, 32, 64), 0.7)
    assert kinds(decompose(bias, DecomposeOptions())) == ["low_rank", "relative_table", "low_rank"]
    prices |= dict.fromkeys((16, 32, 64), 0.9)
    assert kinds(decompose(bias, DecomposeOptions())) == ["dense", "relative_table", "dense"]


def test_auto_prefers_a_table_to_a_dense_bias_that_costs_more(prices: dict[str | int, float]):
    prices |= {"dense": 15, 64: 20}
    bias = table(n=N)
    found = decompose(bias, DecomposeOptions())
    assert kinds(found) == ["relative_table"]
    assert "relative positions is exact, 9 ps per score; dense: 15 ps; low_rank of rank" in (
        found.decisions[0].reason
    )


@pytest.mark.parametrize("method", ["auto", "svd"])
def test_energy_one_allows_exact_terms_only(method: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(truncations, "truncated_svd", None)  # must not even be tried
    bias = torch.cat([smooth(), table()])
    found = decompose(bias, DecomposeOptions(method=method, energy=1.0))
    assert torch.equal(found.bias.dense(N, N), bias)
    assert "low_rank" not in kinds(found)


def test_neural_says_what_there_is():
    with pytest.raises(UsageError, match='"auto", "exact" and "svd"'):
        decompose(smooth(), DecomposeOptions(method="neural"))


# -- guards --------------------------------------------------------------------------------


def one_strong_cell() -> torch.Tensor:
    """Constant but for a little noise and one cell: energy alone calls it rank one."""
    bias = 5 + 0.01 * gaussian(1, 64, 64)
    bias[0, 20, 30] = -20.0
    return bias


def test_a_strong_cell_is_kept_by_centring_and_shown_by_the_logit_error():
    found = decompose(one_strong_cell(), DecomposeOptions(method="svd", fill=False))
    assert found.decisions[0].rank == 1
    assert found.decisions[0].logit_error_max < 0.1  # raw energy would lose 24 here
    raw = torch.full((1, 64, 64), 5.0)  # what rank one of the raw bias amounts to
    assert float(measure(one_strong_cell(), raw).logit_error_max) > 24


def stripe() -> torch.Tensor:
    """Noise of much energy on a few rows, and a faint diagonal that the others live by."""
    bias = 4.0 * torch.eye(64)[None]
    bias[0, :8] += 60 * gaussian(8, 64)
    return bias


def test_the_attention_guard_refuses_what_energy_accepts():
    bias = stripe()
    loose = DecomposeOptions(method="svd", max_attention_error=1.0)
    accepted = decompose(bias, loose).decisions[0]
    assert accepted.term == "low_rank"
    assert accepted.energy >= 0.99
    assert accepted.attention_error > 0.25
    for method in ("svd", "auto"):
        refused = decompose(bias, DecomposeOptions(method=method)).decisions[0]
        assert refused.term == "dense"
        assert f"attention error {accepted.attention_error:.3g}: more than 0.25" in refused.reason
        assert refused.attention_error == 0.0


def test_a_head_that_misses_the_energy_under_the_cap_takes_another_term():
    bias = torch.cat([smooth(), table(), noise()])
    found = decompose(bias, DecomposeOptions(method="svd", max_rank=8))
    assert kinds(found) == ["low_rank", "relative_table", "dense"]
    assert "rank 8 keeps" in found.decisions[1].reason
    assert "less energy than 99" in found.decisions[2].reason
    check_terms(found, bias)
    assert kinds(decompose(bias, DecomposeOptions(max_rank=8)))[0] == "low_rank"


def test_an_identity_is_not_low_rank():
    bias = (6 * torch.eye(48))[None]
    bias[0, 0, 1] = 5.0  # no relative table either
    found = decompose(bias, DecomposeOptions())
    assert kinds(found) == ["dense"]
    assert "low_rank of rank 4" in found.decisions[0].reason
    assert "(padded 64): 6 ps" in found.decisions[0].reason


def test_the_columns_of_refused_heads_are_not_kept():
    bias = torch.cat([noise(), smooth()])
    found = decompose(bias, DecomposeOptions())
    term = found.bias.terms[0]
    assert term.kind == "low_rank"
    assert term.heads == (1,)
    assert term.phi_q.shape == (1, N, found.decisions[1].rank)
    assert term.split is not None and term.split <= term.max_rank


# -- inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "svd", "exact"])
def test_a_zero_bias_and_a_zero_head(method: Any):
    found = decompose(torch.zeros(2, N, N), DecomposeOptions(method=method))
    assert kinds(found) == ["none", "none"]
    assert found.bias.terms == ()
    assert [d.energy for d in found.decisions] == [1.0, 1.0]
    bias = torch.cat([smooth(2), torch.zeros(1, N, N), smooth(1)])
    found = decompose(bias, DecomposeOptions(method=method))
    assert [h for h, kind in enumerate(kinds(found)) if kind == "none"] == [2]
    assert not found.bias.dense(N, N)[2].any()
    check_terms(found, bias)


@pytest.mark.parametrize("method", ["auto", "svd", "exact"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_mask_inside_the_bias_is_refused_by_name(method: Any, bad: float):
    bias = smooth(2)
    bias[1, torch.ones(N, N).triu(1).bool()] = bad
    with pytest.raises(DecompositionError, match=r"bias of layers\.3\.attn holds 1128 entries"):
        decompose(bias, DecomposeOptions(method=method), name="layers.3.attn")


def test_a_garbage_index_is_refused_by_name():
    index = torch.zeros(N, N, dtype=torch.long)
    index[0, 0] = 2**62
    with pytest.raises(DecompositionError, match=r"index of stages\.0"):
        decompose(table(), DecomposeOptions(method="exact"), name="stages.0", index=index)


def test_the_index_is_used():
    at = torch.arange(N)
    index = 2 * (at[:, None] - at[None, :]) + 2 * N  # spread: twice the entries
    found = decompose(table(), DecomposeOptions(method="exact"), index=index)
    assert found.bias.terms[0].table.shape[-1] == 4 * N - 3


def test_heads_on_different_grids_take_two_tables():
    at = torch.arange(36)
    heads = []
    for seed, width in enumerate((6, 4)):  # 6 x 6 and 9 x 4
        row = at[:, None] // width - at[None, :] // width + 36
        column = at[:, None] % width - at[None, :] % width + 36
        heads.append(gaussian(73, 73, seed=seed)[row, column])
    bias = torch.stack([heads[0], heads[1], heads[0] + 1, noise(n=36)[0]])
    found = decompose(bias, DecomposeOptions(method="exact"))
    assert sorted((t.kind, t.heads) for t in found.bias.terms) == [
        ("dense", (3,)), ("relative_table", (0, 2)), ("relative_table", (1,)),
    ]  # fmt: skip
    assert torch.equal(found.bias.dense(36, 36), bias)


def test_heads_that_can_share_a_table_do():
    at = torch.arange(36)
    row, column = at[:, None] // 6 - at[None, :] // 6, at[:, None] % 6 - at[None, :] % 6
    window = gaussian(1, 11, 11)[:, row + 5, column + 5]
    bias = torch.cat([table(n=36), noise(n=36), window])  # a line is a window, too
    found = decompose(bias, DecomposeOptions(method="exact"))
    assert [(t.kind, t.heads) for t in found.bias.terms] == [
        ("relative_table", (0, 2)),
        ("dense", (1,)),
    ]
    assert found.bias.terms[0].table.shape == (2, 121)


def test_short_sites_are_left_alone_by_auto_only():
    bias = smooth(2, n=SHORTEST_N - 1)
    found = decompose(bias, DecomposeOptions())
    assert f"{SHORTEST_N - 1} queries and" in found.left_alone
    assert "gains little (1.18 times at 4 tokens" in found.left_alone
    assert torch.equal(found.bias.dense(*bias.shape[-2:]), bias)  # and still complete
    assert decompose(smooth(2, n=SHORTEST_N), DecomposeOptions()).left_alone is None
    forced = decompose(bias, DecomposeOptions(force_all=True))
    assert forced.left_alone is None
    assert kinds(forced) == ["low_rank", "low_rank"]
    for method in ("svd", "exact"):
        assert decompose(bias, DecomposeOptions(method=method)).left_alone is None


def test_one_decision_holds_for_the_whole_batch():
    easy, hard = (
        torch.cat([smooth(), torch.zeros(1, N, N), table()]),
        torch.cat([smooth(), table(2)]),
    )
    bias = torch.stack([easy, hard])
    found = decompose(bias, DecomposeOptions(method="svd", max_rank=8))
    assert kinds(found) == ["low_rank", "relative_table", "relative_table"]
    assert found.bias.batch_shape() == (2,)
    check_terms(found, bias)
    batched = decompose(bias[:, None], DecomposeOptions(method="svd"))
    single = decompose(hard, DecomposeOptions(method="svd"))
    assert kinds(batched) == ["low_rank"] * 3
    assert batched.decisions[1].rank == single.decisions[1].rank
    assert batched.bias.batch_shape() == (2, 1)


def test_constant_in_one_batch_entry_only_is_not_constant():
    bias = torch.stack([torch.cat([constant(), constant()]), torch.cat([constant(), smooth()])])
    assert kinds(decompose(bias, DecomposeOptions(method="exact"))) == ["none", "dense"]


def test_causal_attention_ignores_hidden_cells():
    visible = torch.ones(N, N).tril().bool()
    bias = constant().clone()
    bias[..., ~visible] = 7.0
    options = DecomposeOptions(method="svd")
    assert kinds(decompose(bias, options, visible=visible)) == ["none"]
    assert kinds(decompose(bias, options)) == ["low_rank"]


@pytest.mark.parametrize("visible", [torch.ones(N, N), torch.ones(1, N, N).bool()])
def test_visible_of_another_form_is_refused(visible: torch.Tensor):
    with pytest.raises(UsageError, match="visible must be bool"):
        decompose(smooth(), DecomposeOptions(), visible=visible)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision(dtype: torch.dtype):
    bias = torch.cat([smooth(), noise()]).to(dtype)
    found = decompose(bias, DecomposeOptions())
    assert kinds(found) == ["low_rank", "dense"]
    assert found.bias.terms[0].phi_q.dtype == torch.float32
    assert torch.equal(found.bias.terms[1].bias[0], bias[1])


def test_a_parameter_gives_terms_without_gradient():
    found = decompose(torch.nn.Parameter(torch.cat([smooth(), noise()])), DecomposeOptions())
    assert not found.bias.requires_grad


def test_the_same_bias_gives_the_same_bits():
    bias = torch.cat([smooth(2), table()])
    one, two = (decompose(bias, DecomposeOptions(method="svd")) for _ in range(2))
    for (name, a), (other, b) in zip(
        one.bias.named_tensors(), two.bias.named_tensors(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    assert one.decisions == two.decisions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("method", ["auto", "svd", "exact"])
def test_a_card_decides_like_the_cpu(method: Any):
    at = torch.arange(N)
    index = at[:, None] - at[None, :] + N - 1
    visible = torch.ones(N, N).tril().bool()
    bias = torch.cat([smooth(), table(), noise(), constant()]).expand(2, 4, N, N)
    options = DecomposeOptions(method=method)
    cpu = decompose(bias, options, index=index, visible=visible)
    card = decompose(bias.cuda(), options, index=index, visible=visible)
    assert kinds(card) == kinds(cpu)
    assert [d.rank for d in card.decisions] == [d.rank for d in cpu.decisions]
    assert all(t.device.type == "cuda" for _, t in card.bias.named_tensors())
    expected, found = cpu.bias.dense(N, N), card.bias.dense(N, N).cpu()
    assert torch.allclose(found, expected, atol=1e-5)


def never(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


def test_an_svd_that_fails_is_an_error_for_svd_and_no_matter_for_auto(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("svd", "eigh"):
        monkeypatch.setattr(torch.linalg, name, never)
    with pytest.raises(DecompositionError, match=r"blocks\.7: .*did not converge"):
        decompose(smooth(), DecomposeOptions(method="svd"), name="blocks.7")
    assert kinds(decompose(smooth(), DecomposeOptions())) == ["dense"]


def test_terms_survive_a_round_trip_through_their_state():
    bias = torch.cat([smooth(), table(), noise(), constant()])
    found = decompose(bias, DecomposeOptions(method="svd", max_rank=8))
    rebuilt = type(found.bias).from_state(found.bias.spec(), dict(found.bias.named_tensors()))
    assert torch.equal(rebuilt.dense(N, N), found.bias.dense(N, N))


# -- costs ---------------------------------------------------------------------------------


def test_rank_buckets():
    assert [rank_bucket(r) for r in (0, 1, 16, 17, 32, 33, 65)] == [0, 16, 16, 32, 32, 64, 128]


@pytest.mark.parametrize("method", ["auto", "svd"])
def test_a_mask_inside_of_a_bias_does_not_pass_for_low_rank(method: str) -> None:
    """Rank 1 keeps almost all the energy of -1e9 on half of the keys, and nothing of the rest."""
    torch.manual_seed(0)
    folded = torch.randn(2, 64, 64)
    folded[..., 32:] -= 1e9
    found = decompose(folded, DecomposeOptions(method=method, energy=0.99))
    assert {d.term for d in found.decisions} == {"dense"}
    assert torch.equal(found.bias.dense(64, 64), folded)


def test_a_mild_mask_inside_of_a_bias_shows_in_the_report() -> None:
    """-100, as Swin has it, is for the guard and the report: the error of the weights is large."""
    torch.manual_seed(0)
    folded = torch.randn(2, 64, 64)
    folded[..., 32:] -= 100
    found = decompose(folded, DecomposeOptions(energy=0.99, max_attention_error=0.02))
    assert {d.term for d in found.decisions} == {"dense"}
    loose = decompose(folded, DecomposeOptions(energy=0.99, max_attention_error=1.0))
    off = (loose.bias.dense(64, 64) - folded)[..., :32].abs().max()
    for decision in loose.decisions:
        assert decision.term == "low_rank" and off > 1
        assert decision.attention_error > 0.02


@pytest.mark.parametrize("cheap", [True, False])
def test_a_bias_that_entries_share_is_dense_if_all_heads_are(
    cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head would take factors: dense alone its tiles are shared, and with another term not."""
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(64, 1, generator=draw) @ torch.randn(1, 64, generator=draw)
    bias = torch.stack([low, torch.randn(64, 64, generator=draw)])
    options, at = DecomposeOptions(), {"head_dim": 32}
    apart = decompose(bias, options, **at)  # type: ignore[arg-type]
    kinds = [decision.term for decision in apart.decisions]
    assert kinds == ["low_rank", "dense"]
    monkeypatch.setattr(choose, "shared_dense_cost", lambda n, m, size: 0.0 if cheap else math.inf)
    found = decompose(bias, options, shared=True, **at)  # type: ignore[arg-type]
    assert [d.term for d in found.decisions] == (["dense", "dense"] if cheap else kinds)
    if cheap:
        assert torch.equal(found.bias.dense(64, 64), bias)
        assert found.bias.terms[0].heads is None
        assert "share its tiles where all heads take it" in found.decisions[0].reason
        assert "low_rank of rank 1" in found.decisions[0].reason
    for other in (DecomposeOptions(method="svd"), DecomposeOptions(method="exact")):
        same = decompose(bias, other, **at)  # type: ignore[arg-type]
        assert decompose(bias, other, shared=True, **at).decisions == same.decisions  # type: ignore[arg-type]


@pytest.mark.parametrize(("cost", "together"), [(1.5, True), (1.6, False)])
def test_heads_are_dense_together_if_that_costs_no_more_in_all(cost: float, together: bool) -> None:
    picked = {
        0: (choose.Candidate("low_rank", 1.0, "few columns", rank=3), "first"),
        1: (choose.Candidate("dense", 2.0, "exact"), "second"),
    }
    found = choose.all_dense(picked, cost)
    assert [c.term for c, _ in found.values()] == (
        ["dense"] * 2 if together else ["low_rank", "dense"]
    )
    assert (found is picked) != together

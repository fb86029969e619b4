"""What a site remembers of pairs that come again: factors where all steps pay for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import UsageError, factors_once, pair_memory
from flashbias_convert.decompose import Decomposition
from flashbias_convert.decompose.serving import Serving
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.pair_attention import PairAttention, PairCall
from flashbias_convert.pair_memory import PairMemory
from flashbias_convert.terms import Dense, LowRank, ScoreBias

N, HEADS, WIDTH = 12, 2, 4


def bias(n: int = N) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(1, HEADS, n, 1, generator=draw) * torch.randn(1, 1, 1, n, generator=draw)


class Site(PairAttention):
    """Attends with a bias that is its input."""

    def bias_weights(self) -> tuple[Tensor, ...]:
        return ()

    def forward(self, q: Tensor, z: Tensor) -> Tensor:
        made = z.movedim(-1, -3)
        return self.attend(PairCall(q, q, q, z, lambda: made, lambda: z[..., 0]))


def site() -> Any:
    """A patched site, as the engine leaves it."""
    made = Site.__new__(Site)
    nn.Module.__init__(made)
    made.score_bias = ScoreBiasModule(ScoreBias((), HEADS), builders=("dense",), backend="sdpa")
    return made


def served(memory: PairMemory, calls: int, rows: int = 1, n: int = N) -> tuple[Tensor, ...]:
    """Calls with one representation, which is returned: another one may take its place."""
    source = bias(n)
    for _ in range(calls):
        memory.prepared(source, (), lambda: source, 16, rows)
    return (source,)


def asked(monkeypatch: pytest.MonkeyPatch, in_vain: bool = False) -> list[Serving]:
    """What a memory tells of the calls that its terms are for."""
    found: list[Serving] = []

    def decompose(bias: Tensor, *, serving: Serving, **_: Any) -> Decomposition:
        found.append(serving)
        return Decomposition(ScoreBias((Dense(bias=bias),), HEADS), (), in_vain=in_vain)

    monkeypatch.setattr(pair_memory, "decompose_quickly", decompose)
    return found


def test_the_first_call_is_not_among_those_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went by before terms were made, unless the caller vouches for all calls."""
    found = asked(monkeypatch)
    served(PairMemory("site", steps=50), 4, rows=5)
    served(PairMemory("site", steps=50, unchanged=True), 4, rows=3)
    assert found == [Serving(49, 5, "cpu"), Serving(50, 3, "cpu")]


def test_what_was_in_vain_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But longer structures save more, and so do more samples."""
    found = asked(monkeypatch, in_vain=True)
    memory = PairMemory("site")
    kept = [served(memory, 2, rows, n) for rows, n in ((2, N), (2, N), (1, N), (2, N + 1), (2, N))]
    assert kept and [s.in_vain for s in found] == [False, True, True, False, True]


def test_rows_of_a_call_are_all_that_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    module = site()
    q, z = torch.randn(2, 5, HEADS, N, WIDTH), torch.randn(2, 1, N, N, HEADS)
    with torch.no_grad(), factors_once(nn.ModuleList([module]), steps=7):
        for _ in range(2):
            module(q, z)
    with torch.no_grad(), factors_once(nn.ModuleList([module])):
        for _ in range(2):
            module(q, z)
    assert found == [Serving(6, 10, "cpu"), Serving(199, 10, "cpu")]


@pytest.mark.usefixtures("dear_matrices")
@pytest.mark.parametrize(("steps", "kind"), [(10**9, LowRank), (200, Dense), (1, Dense)])
def test_steps_decide(
    steps: int, kind: type[LowRank | Dense], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A millisecond is more than tokens this few save in 200 calls, and less than in a billion."""
    monkeypatch.setattr("flashbias_convert.decompose.serving.factors_ms", lambda *_: 1.0)
    monkeypatch.setattr("flashbias_convert.decompose.serving.is_measured", lambda card: True)
    module = site()
    q, z = torch.randn(5, HEADS, N, WIDTH), bias().movedim(-3, -1).contiguous()
    with torch.no_grad():
        expected = module(q, z)
        with factors_once(nn.ModuleList([module]), rank=1, steps=steps) as (memory,):
            outputs = [module(q, z) for _ in range(3)]
    assert (memory.calls, memory.served) == (3, 1)
    assert {d.term for d in memory.decisions} == {kind.kind}
    for out in outputs:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert kind is LowRank or torch.equal(out, expected)
    if kind is Dense:
        why = f"in {steps - 1} calls, and take 1 ms to make"
        assert all(d.reason.endswith(why) for d in memory.decisions)


class Projected(Site):
    """Attends with a projection of its input."""

    weight: nn.Parameter

    def bias_weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, q: Tensor, z: Tensor) -> Tensor:
        made = (z * self.weight).movedim(-1, -3)
        return self.attend(PairCall(q, q, q, z, lambda: made, lambda: z[..., 0]))


@pytest.mark.usefixtures("free_factors")
def test_what_projects_a_bias_keeps_its_gradient() -> None:
    """What is kept has none: with gradients on, every call makes its own."""
    module: Any = site()
    module.__class__ = Projected
    module.weight = nn.Parameter(torch.ones(HEADS))
    q, z = torch.randn(1, HEADS, N, WIDTH), bias().movedim(-3, -1).contiguous()
    with factors_once(nn.ModuleList([module]), rank=1) as (memory,):
        found = [torch.autograd.grad(module(q, z).sum(), module.weight)[0] for _ in range(3)]
        assert memory.served == 0 and all(torch.equal(g, found[0]) for g in found)
        with torch.no_grad():
            for _ in range(3):
                module(q, z)
        assert memory.served == 1


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "200"])
def test_steps_are_a_number_of_calls(steps: Any) -> None:
    with (
        pytest.raises(UsageError, match="steps must be a positive integer"),
        factors_once(nn.ModuleList([site()]), steps=steps),
    ):
        pass

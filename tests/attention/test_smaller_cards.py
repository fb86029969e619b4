"""Cards with less shared memory than the one that launch settings were measured on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from flashbias_convert.attention import launch
from flashbias_convert.attention.launch_table import launch_settings
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape

from .cases import Inputs
from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("Triton's interpreter does not compile", allow_module_level=True)

from triton.runtime.errors import OutOfResources  # noqa: E402

from .ahead_of_time import Card, Compiled, compile_attention, compile_training  # noqa: E402

#: A10, L4, L40S, and what is sold for games
AMPERE, ADA = Card(86, 99 * 1024), Card(89, 99 * 1024)
#: a card that nobody makes: even short steps are too long for it
TINY = Card(80, 24 * 1024)

Terms = Callable[[Inputs], Sequence[Any]]
#: calls whose settings take more than such cards have, and what they take beside q, k and v
TOO_LARGE: dict[str, tuple[int, Terms]] = {
    "head-size-128-rank16": (128, lambda x: [x.low_rank(16, split=0)]),
    "head-size-96-rank7": (96, lambda x: [x.low_rank(7), x.key_bias()]),
    "head-size-256-dense": (256, lambda x: [x.low_rank(56), x.dense()]),
}


def inputs(d: int, n: int = 1024) -> Inputs:
    return Inputs(torch.device("cpu"), torch.float16, n=n, d=d, heads=2)


def forward(card: Card, d: int, terms: Terms) -> list[Compiled]:
    x = inputs(d)
    return compile_attention(x.q, x.k, x.v, x.bias(*terms(x)), card=card)


@pytest.mark.parametrize("card", [AMPERE, ADA], ids=lambda card: str(card.capability))
@pytest.mark.parametrize("name", TOO_LARGE)
def test_smaller_settings_take_the_place_of_those_without_room(name: str, card: Card) -> None:
    d, terms = TOO_LARGE[name]
    (compiled,) = forward(card, d, terms)
    assert compiled.shared <= card.shared_bytes
    (usual,) = forward(Card(card.capability, 10**6), d, terms)
    assert usual.shared > card.shared_bytes, "nothing had to be smaller"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("card", [Card(89, 40 * 1024), TINY], ids=["small", "tiny"])
def test_backward_kernels_find_room(card: Card, deterministic: bool) -> None:
    x = inputs(64, n=256)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    trained = [
        term.map_tensors(lambda _, t: t.requires_grad_() if t.is_floating_point() else t)
        for term in (x.low_rank(16, split=0), x.dense())
    ]
    compiled = compile_training(
        q, k, v, x.bias(*trained), forward=False, card=card, deterministic=deterministic
    )
    names = {c.name.removesuffix("_kernel") for c in compiled}
    rows = {"query_gradients", "key_gradients"} if deterministic else {"all_gradients"}
    assert names >= rows | {"pair_gradients"}
    assert all(c.shared <= card.shared_bytes for c in compiled)


def test_room_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls of the same kind start with what has fitted."""
    tried: list[LaunchSettings] = []

    class Launched:
        def __init__(self, settings: LaunchSettings) -> None:
            self.settings = settings

        def run(self, *_: Any) -> None:
            tried.append(self.settings)
            if self.settings.block_n > 32:
                raise OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(launch, "_plan", lambda spec, tensors, s, *_: (Launched(s), s))
    monkeypatch.setattr(launch, "_PLANS", {})
    x = inputs(128)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "o": torch.empty_like(x.q)}
    options: dict[str, Any] = {"scale": 1.0, "causal": False, "query_start": 0, "cosine": False}
    spec = launch.GroupSpec(None)
    first = launch_settings(LaunchShape(1024, 128, 128, 0, True, ()))
    launch.launch(spec, tensors, **options)
    assert tried[0] == first and tried[-1].block_n == 32 and len(tried) > 2
    launch.launch(spec, tensors, **options)
    assert tried[-1] == tried[-2] and tried.count(tried[-1]) == 2
    with launch.forced(first), pytest.raises(OutOfResources):  # those who measure want to know
        launch.launch(spec, tensors, **options)


def test_room_depends_on_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that take less keep their settings, whatever has been called before."""
    tried: list[LaunchSettings] = []

    class Launched:
        def __init__(self, settings: LaunchSettings) -> None:
            self.settings = settings

        def run(self, _: Any, tensors: Any, __: Any) -> None:
            tried.append(self.settings)
            q = next(iter(tensors))
            if self.settings.block_n > 32 and q.data_ptr() % 16 == 0:
                raise OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(launch, "_plan", lambda spec, tensors, s, *_: (Launched(s), s))
    monkeypatch.setattr(launch, "_PLANS", {})
    memory, shape = torch.zeros(2 * 128 * 64 + 1, dtype=torch.float16), (1, 2, 128, 64)
    found = []
    for off in (1, 0, 1, 0):
        q = memory[off : off + 2 * 128 * 64].view(shape)
        tensors = {
            "q": q,
            "k": torch.zeros(shape),
            "v": torch.zeros(shape),
            "o": torch.zeros(shape),
        }
        launch.launch(
            launch.GroupSpec(None), tensors, scale=1.0, causal=False, query_start=0, cosine=False
        )
        found.append(tried[-1])
    assert found[0] == found[2] and found[1] == found[3]
    assert found[0].block_n > 32 == found[1].block_n


def test_other_failures_are_not_taken_for_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock(side_effect=lambda spec, tensors, settings, *_: (failing, settings))
    failing = mock.Mock()
    failing.run.side_effect = RuntimeError("the card is on fire")
    monkeypatch.setattr(launch, "_plan", made)
    monkeypatch.setattr(launch, "_PLANS", {})
    x = inputs(128)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "o": torch.empty_like(x.q)}
    with pytest.raises(RuntimeError, match="on fire"):
        launch.launch(
            launch.GroupSpec(None), tensors, scale=1.0, causal=False, query_start=0, cosine=False
        )
    assert made.call_count == 1


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("n", [1, 64, 1024])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_settings_become_smaller_until_nothing_is_left(d: int, n: int, half: bool) -> None:
    settings: LaunchSettings | None = launch_settings(LaunchShape(n, d, d, 16, half, ()))
    steps = []
    while settings is not None:
        steps.append(settings)
        assert len(steps) < 20
        settings = settings.smaller()
    assert (steps[-1].block_m, steps[-1].block_n, steps[-1].num_stages) == (16, 16, 1)
    for before, after in itertools.pairwise(steps):
        size = [(s.block_m * s.block_n, s.num_stages) for s in (before, after)]
        assert size[1] < size[0] and after.num_warps <= before.num_warps

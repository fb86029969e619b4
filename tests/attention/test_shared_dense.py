"""Two batch entries whose queries share tiles of a dense bias, as the rows of a triangle do."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashbias_convert import Dense, KeyBias, ScoreBias
from flashbias_convert.attention import flashbias_attention, launch
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape, launch_settings

from .cases import Inputs
from .conftest import HAS_GPU
from .test_padding import mask_of
from .test_values import check

SMALL = LaunchSettings(32, 16, 4, 2, entries=2)
#: with wide products of the tensor cores, which the interpreter does not know
WIDE = (LaunchSettings(64, 32, 4, 3, 168, entries=2), LaunchSettings(128, 32, 8, 3, 128, entries=2))


@pytest.fixture(params=[SMALL, *WIDE] if HAS_GPU else [SMALL], ids=lambda s: f"{s.block_m}-rows")
def settings(request: pytest.FixtureRequest) -> LaunchSettings:
    found: LaunchSettings = request.param
    return found


@pytest.fixture(autouse=True)
def shared(settings: LaunchSettings, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets all calls share; says of every plan whether it does."""
    pytest.importorskip("triton")
    found: list[bool] = []
    is_shared = launch.is_shared

    def told(*args: Any, **options: Any) -> bool:
        found.append(is_shared(*args, **options))
        return found[-1]

    monkeypatch.setattr(launch, "shape_of", lambda *_, **__: None)
    monkeypatch.setattr(launch, "settings_for", lambda *_: settings)
    monkeypatch.setattr(launch, "is_shared", told)
    monkeypatch.setattr(launch, "_PLANS", {})
    return found


def dense(x: Inputs, batch: tuple[int, ...] = (), heads: int | None = None) -> ScoreBias:
    """A matrix in half precision for each head, as a projection of pairs makes it."""
    size = (*batch, x.heads if heads is None else heads, x.n, x.m)
    return x.bias(Dense(bias=x.normal(*size).to(x.dtype)))


@pytest.mark.parametrize("m", [64, 72, 75])
@pytest.mark.parametrize("batch", [(2,), (5,), (2, 3), (2, 1, 3)])
def test_values(
    batch: tuple[int, ...], m: int, half: torch.dtype, kernel: str, device: torch.device,
    shared: list[bool],
) -> None:  # fmt: skip
    """Even and odd numbers of entries, whole tiles and others, rows that no vector divides."""
    x = Inputs(device, half, batch=batch, n=70, m=m, d=24, dv=40)
    check(x, dense(x), kernel, scale=0.7)
    assert shared == [True]


def test_entries_of_a_batch_with_a_bias_each(
    half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    """Structures differ in it, and their rows do not; a matrix may also belong to all heads."""
    x = Inputs(device, half, batch=(2, 3), n=40, m=48)
    check(x, dense(x, batch=(2, 1)), kernel)
    check(x, dense(x, batch=(2, 1), heads=1), kernel)
    assert shared == [True, True]
    check(x, dense(x, batch=(1, 3)), kernel)
    check(x, dense(x, batch=(2, 3)), kernel)
    assert shared == [True, True, False, False]


#: visible keys of two entries that meet in a program, and what is odd about them
PAIRS = {
    "same": [(3, 61), (3, 61)],
    "right": [(0, 64), (0, 50)],
    "left": [(17, 96), (40, 96)],
    "one-sees-nothing": [(20, 70), (0, 0)],
    "the-other-sees-nothing": [(0, 0), (0, 33)],
    "nothing": [(0, 0), (0, 0)],
    "apart": [(0, 16), (80, 96)],
    "one-key": [(95, 96), (95, 96)],
    "odd": [(0, 96), (5, 90), (32, 48)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_padding(
    name: str, half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    ranges = PAIRS[name]
    x = Inputs(device, half, batch=(len(ranges),), n=40, m=96)
    check(x, dense(x), kernel, key_mask=mask_of(ranges, x.m, device))
    assert shared == [True]


def test_holes(half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]) -> None:
    x = Inputs(device, half, batch=(4,), n=40, m=96)
    mask = torch.ones(4, x.m, dtype=torch.bool, device=device)
    mask[0, 50], mask[1, ::2], mask[2, 16:32] = False, False, False
    check(x, dense(x), kernel, key_mask=mask)
    assert shared == [True]


def test_a_hidden_key_may_hold_anything(
    half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Padding takes no part, also where the other entry sees less, more, or nothing at all."""
    ranges = [(0, 48), (0, 48), (0, 96), (0, 40), (20, 90), (30, 96), (0, 0), (0, 33), (0, 0)]
    x = Inputs(device, half, batch=(len(ranges),), n=40, m=96)
    mask = mask_of(ranges, x.m, device)
    bias = dense(x)
    expected = flashbias_attention(x.q, x.k, x.v, bias, key_mask=mask, backend=kernel)
    for hidden in (x.k, x.v):
        hidden.masked_fill_(~mask[:, None, :, None], float("nan"))
    found = flashbias_attention(x.q, x.k, x.v, bias, key_mask=mask, backend=kernel)
    assert torch.equal(found, expected) and not found[6].any()


@pytest.mark.parametrize("masked", [False, True])
def test_gates(
    masked: bool, half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    x = Inputs(device, half, batch=(3,), n=40, m=96)
    gate = x.normal(3, 40, 2, 16).to(half).transpose(1, 2)  # as a projection has it
    mask = mask_of([(0, 96), (0, 50), (0, 50)], x.m, device) if masked else None
    bias = dense(x)
    plain = flashbias_attention(
        *(t.double() for t in (x.q, x.k, x.v)), bias, key_mask=mask, backend="eager"
    )
    found = flashbias_attention(x.q, x.k, x.v, bias, gate=gate, key_mask=mask, backend=kernel)
    expected = plain * gate.double().sigmoid()
    rounding = torch.finfo(half).eps
    assert (found.double() - expected).abs().max() <= 4 * rounding * expected.abs().max()
    assert shared == [True]


@pytest.mark.parametrize("rise", [-1e4, -30.0, 9.0, 300.0])
@pytest.mark.parametrize("entry", [0, 1])
def test_levels(
    entry: int, rise: float, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """The first tile says little about the others: of one entry, whose keys say so, or of both."""
    x = Inputs(device, half, batch=(2,), n=40, m=96)
    bias = x.normal(2, 40, 96)
    bias[..., :50] += rise
    check(x, x.bias(Dense(bias=bias.to(half))), kernel)
    x.k[entry, :, 20:60] *= 30.0  # large scores of both signs
    check(x, dense(x), kernel)


def test_the_same_bits_each_time(half: torch.dtype, kernel: str, device: torch.device) -> None:
    x = Inputs(device, half, batch=(3,), n=40, m=96)
    bias = dense(x)
    first, second = (flashbias_attention(x.q, x.k, x.v, bias, backend=kernel) for _ in range(2))
    assert torch.equal(first, second)


def test_grouped_heads_and_layouts(
    half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    """Few heads of keys; rows of one entry far from each other."""
    x = Inputs(device, half, batch=(3,), heads=4, kv_heads=2, n=40, m=48)
    bias = dense(x)
    check(x, bias, kernel)
    for name in ("q", "k", "v"):
        tensor = getattr(x, name)
        setattr(x, name, tensor.movedim(-2, 0).contiguous().movedim(0, -2))
    check(x, bias, kernel)
    assert shared == [True, True]


@pytest.mark.parametrize(
    "why", ["another term", "causal", "fp32", "one entry", "a scale per head", "few queries"]
)
def test_other_calls_share_nothing(
    why: str, half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    dtype = torch.float32 if why == "fp32" else half
    batch = (1,) if why == "one entry" else (2,)
    x = Inputs(device, dtype, batch=batch, n=8 if why == "few queries" else 40, m=48)
    bias, options = dense(x), {}
    if why == "another term":
        bias += x.bias(KeyBias(values=x.normal(2, 48)))
    elif why == "causal":
        options = {"causal": True}
    elif why == "a scale per head":
        options = {"scale": torch.tensor([0.5, 0.2], device=device)}
    check(x, bias, kernel, **options)
    assert shared and not any(shared)


def test_training_shares_nothing(
    half: torch.dtype, kernel: str, device: torch.device, shared: list[bool]
) -> None:
    x = Inputs(device, half, batch=(2,), n=40, m=48)
    q: Tensor = x.q.requires_grad_()
    flashbias_attention(q, x.k, x.v, dense(x), backend=kernel).sum().backward()
    assert shared and not any(shared)


def test_a_program_has_two_entries(
    settings: LaunchSettings, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Half as many programs as without."""
    x = Inputs(device, half, batch=(2, 5), n=40, m=48)
    bias, grids = dense(x), []
    plan = launch.LaunchPlan

    def made(*args: Any, **kwargs: Any) -> Any:
        grids.append(kwargs["grid"])
        return plan(*args, **kwargs)

    for entries in (1, 2):
        own = dataclasses.replace(settings, entries=entries)
        with mock.patch.object(launch, "LaunchPlan", made), launch.forced(own):
            flashbias_attention(x.q, x.k, x.v, bias, backend=kernel)
    blocks = -(-40 // settings.block_m)
    assert grids == [blocks * 2 * 10, blocks * 2 * 5]  # the batch is one dimension of 10


@pytest.mark.parametrize("n", [40, 144, 384])
def test_settings_of_calls_that_may_share(n: int) -> None:
    """Narrow heads do by themselves; the rule says so for these calls alone."""
    told = {"d": 32, "dv": 32, "columns": 0, "half": True, "terms": ("dense",)}
    alone = launch_settings(LaunchShape(n, **told))
    shared = launch_settings(LaunchShape(n, **told, shared=True))
    assert (alone.entries, shared.entries) == (1, 2)
    wide = LaunchShape(n, **told | {"d": 64}, shared=True)
    assert launch_settings(wide) == launch_settings(dataclasses.replace(wide, shared=False))

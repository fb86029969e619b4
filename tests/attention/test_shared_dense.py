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
from flashbias_convert.attention.launch_table import launch_settings
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape

from .cases import Inputs, check
from .conftest import HAS_GPU
from .test_padding import mask_of

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
    "why",
    ["another term", "causal", "fp32", "one entry", "a scale per head", "few queries", "a mask",
     "a gate"],
)  # fmt: skip
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
    elif why == "a mask":
        options = {"key_mask": mask_of([(0, 48), (3, 40)], x.m, device)}
    if why == "a gate":
        flashbias_attention(x.q, x.k, x.v, bias, gate=x.q, backend=kernel)
    else:
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


@pytest.mark.parametrize(("n", "entries"), [(40, 2), (144, 2), (384, 1), (1218, 2), (1345, 2)])
def test_settings_of_calls_that_may_share(n: int, entries: int) -> None:
    """Narrow heads do by themselves where it was faster; the rule says so for these calls alone."""
    told = {"d": 32, "dv": 32, "columns": 0, "half": True, "terms": ("dense",)}
    alone = launch_settings(LaunchShape(n, **told))
    shared = launch_settings(LaunchShape(n, **told, shared=True))
    assert (alone.entries, shared.entries) == (1, entries)
    wide = LaunchShape(n, **told | {"d": 64}, shared=True)
    assert launch_settings(wide) == launch_settings(dataclasses.replace(wide, shared=False))

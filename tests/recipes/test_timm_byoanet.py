"""Bottleneck and halo attention of timm, patched, against the originals, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

pytest.importorskip("timm")

#: maps of what is called
SIZE = (8, 12)


class Two(nn.Module):
    """Two blocks of a convolutional network, whose maps have their channels first."""

    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.attention = nn.ModuleList(attention)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.attention:
            x = x + block(x) if block(x).shape == x.shape else block(x)
        return x


def bottleneck() -> nn.Module:
    from timm.layers.bottleneck_attn import BottleneckAttn

    scaled = BottleneckAttn(
        16, 32, feat_size=SIZE, num_heads=4, qk_ratio=0.5, qkv_bias=True, scale_pos_embed=True,
        stride=2,
    )  # fmt: skip
    return Two(BottleneckAttn(16, feat_size=SIZE, num_heads=2), scaled)


def halo(**changes: Any) -> nn.Module:
    from timm.layers.halo_attn import HaloAttn

    plain = HaloAttn(16, num_heads=2, block_size=4, halo_size=1)
    settings = {"num_heads": 4, "block_size": 4, "halo_size": 2, "stride": 2, "dim_head": 8}
    return Two(plain, HaloAttn(16, 32, **settings | changes))


def run(model: nn.Module, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    made = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    dtype = next(model.parameters()).dtype
    x = made.bfloat16().half().to(dtype).to(memory_format=memory_format)
    out: Tensor = model(x)
    return out


MAKE: dict[str, Callable[[], nn.Module]] = {
    "bottleneck": bottleneck,
    "halo": lambda: halo(scale_pos_embed=True),
    "halo pooled": lambda: halo(avg_down=True, qkv_bias=True),
}
BIAS = ("height_rel", "width_rel")
CASES = {
    name: Case(lambda make=make: randomised(make(), std=0.4, rel=1.5), run, BIAS, {"patched": 2})
    for name, make in MAKE.items()
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", CASES)
def test_channels_last(name: str) -> None:
    model = CASES[name].make()
    expected = CASES[name].output(model)
    CASES[name].patched(model)
    with torch.no_grad():
        found = run(model.to(memory_format=torch.channels_last), torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name])
    parity.check_training(CASES[name])
    parity.check_follows_weights(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_file_loads(name: str, tmp_path: Path) -> None:
    parity.check_file(CASES[name], tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("bottleneck", [(96, 96, 2, 8), (96, 96, 4, 4)]), ("halo", [(16, 36, 2, 8), (4, 64, 4, 8)])],
)
def test_sizes_are_those_of_maps_and_blocks(name: str, sizes: list[tuple[int, ...]]) -> None:
    sites = inspect_model(CASES[name].make()).sites
    assert [(s.n, s.m, s.heads, s.head_dim) for s in sites] == sizes


@pytest.mark.parametrize("name", ["botnet26t_256", "halonet26t"])
def test_models_of_timm(name: str) -> None:
    import timm

    model = timm.create_model(name, num_classes=3).eval()
    plan = inspect_model(model, force_all=True)
    assert plan.counts() == {"patched": len(plan.sites)} and len(plan.sites) > 1

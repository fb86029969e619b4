"""Masks of padding: the kernel works out where it begins and leaves out what is hidden."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashbias_convert import Alibi, Dense
from flashbias_convert.attention import flashbias_attention

from .cases import BIASES, Inputs, check

#: visible keys of the entries of a batch, as (first, end)
RANGES = {
    "right": [(0, 300), (0, 256), (0, 255), (0, 129), (0, 64), (0, 3), (0, 1), (0, 0)],
    "left": [(0, 300), (1, 300), (63, 300), (64, 300), (128, 300), (130, 300), (299, 300)],
    "both": [(1, 299), (64, 128), (65, 127), (70, 71), (120, 135), (128, 256), (63, 65)],
}


def mask_of(ranges: list[tuple[int, int]], m: int, device: torch.device) -> Tensor:
    """True from `first` to `end`, shape (batch, m)."""
    keys = torch.arange(m, device=device)
    return torch.stack([(keys >= first) & (keys < end) for first, end in ranges])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", RANGES)
def test_padding(
    side: str, causal: bool, dtype: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Ends that are those of tiles, one off, and in the middle; entries that see nothing."""
    ranges = RANGES[side]
    x = Inputs(device, dtype, batch=(len(ranges),), n=40, m=300, heads=1)
    mask = mask_of(ranges, x.m, device)
    for name in ("none", "low_rank") if causal else ("dense",):
        check(x, BIASES[name](x), kernel, key_mask=mask, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_holes(causal: bool, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Hidden keys between visible ones: one, a tile, every other one, all but the ends."""
    x = Inputs(device, half, batch=(5,), n=70, m=300, heads=1)
    mask = torch.ones(5, x.m, dtype=torch.bool, device=device)
    mask[0, 100] = False
    mask[1, 64:128] = False
    mask[2, ::2] = False
    mask[3, 1:-1] = False
    mask[4, :10], mask[4, 150], mask[4, 290:] = False, False, False
    check(x, BIASES["low_rank"](x), kernel, key_mask=mask, causal=causal)


@pytest.mark.parametrize("floor", [-1e4, -30.0, 30.0])
def test_levels(floor: float, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """What is hidden in the tile at the left must not raise the level of the others.

    Where the others are far above that tile, so are keys of the tile that follows it: all of them
    take part when a block is computed once more.
    """
    x = Inputs(device, half, batch=(2,), n=70, m=300, heads=1, d=32)
    bias = x.normal(1, 70, 300)
    bias[..., :70], bias[..., 200:] = bias[..., :70] - floor, bias[..., 200:] + floor
    bias[..., 96:140] += floor
    mask = mask_of([(70, 300), (70, 200)], x.m, device)
    check(x, x.bias(Dense(bias=bias)), kernel, key_mask=mask)


def test_rows_of_a_batch_dimension(kernel: str, device: torch.device) -> None:
    """A mask for every row of a triangle, read with the stride of a slice."""
    x = Inputs(device, batch=(2, 3), n=20, m=150)
    wide = x.integers(2, 2, 3, 300) > 0
    wide[:, :, :200], wide[0, 1] = True, False
    check(x, BIASES["dense"](x), kernel, key_mask=wide[..., ::2])


def test_more_keys_than_are_looked_at_together(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, batch=(4,), n=3, m=2200, heads=1)
    mask = mask_of([(0, 1024), (1030, 2200), (1000, 2060), (2100, 2101)], x.m, device)
    check(x, x.bias(Alibi(slopes=torch.full((1,), 0.01, device=device))), kernel, key_mask=mask)


def test_hidden_values_are_not_read(kernel: str, device: torch.device) -> None:
    """Tiles of padding may hold anything: their keys and values take no part."""
    x = Inputs(device, torch.float16, batch=(1,), n=16, m=512)
    mask = mask_of([(0, 200)], x.m, device)
    clean = flashbias_attention(x.q, x.k, x.v, key_mask=mask, backend=kernel)
    x.k[..., 384:, :], x.v[..., 384:, :] = float("nan"), float("nan")
    assert torch.equal(flashbias_attention(x.q, x.k, x.v, key_mask=mask, backend=kernel), clean)

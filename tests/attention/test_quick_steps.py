"""Steps that do not follow the largest score: the level of the first tile may be far from it.

Sequences have several tiles of keys. Biases raise or lower whole stretches of keys, so that the
first tile says little about the others; the result must be that of the formula all the same.
"""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import Alibi, KeyBias
from flashbias_convert.attention import flashbias_attention

from .cases import BIASES, Inputs, check


def steps(x: Inputs, *heights: float) -> KeyBias:
    """A bias that is constant along equal stretches of the keys."""
    values = torch.tensor(heights, device=x.device).repeat_interleave(-(-x.m // len(heights)))
    return KeyBias(values=values[: x.m].expand(x.heads, x.m).contiguous())


@pytest.mark.parametrize("m", [256, 290])
@pytest.mark.parametrize("rise", [-1e4, -300.0, -30.0, -9.0, 9.0, 30.0, 300.0, 1e4])
def test_stretches_of_keys(
    rise: float, m: int, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Both ends in turn hold the largest scores, by little, by much, and beyond every exponent."""
    x = Inputs(device, half, batch=(1,), n=70, m=m, d=32)
    for heights in ((0.0, rise, 0.0, 0.0), (0.0, 0.0, 0.0, rise), (rise, 0.0, 0.0, 0.0)):
        check(x, x.bias(steps(x, *heights)), kernel)


@pytest.mark.parametrize("floor", [-1e4, -100.0, -12.0, 40.0])
def test_every_score_is_far_from_zero(
    floor: float, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    x = Inputs(device, half, batch=(1,), n=70, m=200, d=32)
    check(x, x.bias(steps(x, floor)), kernel)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(side: str, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """The first tile is hidden from some entries of the batch, every tile from one."""
    x = Inputs(device, half, batch=(3,), n=70, m=256, d=32)
    visible = torch.ones(3, x.m, dtype=torch.bool, device=device)
    visible[0, : 130 if side != "right" else 0] = False
    visible[0, x.m - (100 if side != "left" else 0) :] = False
    visible[1] = False
    check(x, x.bias(x.low_rank()), kernel, key_mask=visible)


@pytest.mark.parametrize("slope", [0.5, 8.0])
def test_steep_alibi(slope: float, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Far keys are thousands below the near ones."""
    x = Inputs(device, half, batch=(1,), n=300, d=32)
    slopes = torch.tensor([slope, slope / 64], device=device)
    for causal in (True, False):
        check(x, x.bias(Alibi(slopes=slopes)), kernel, causal=causal)
    check(x, x.bias(Alibi(slopes=slopes, symmetric=True)), kernel)


@pytest.mark.parametrize(
    "name", ["none", "low_rank", "relative_table", "regions", "dense", "axial", "all"]
)
def test_long_rows(name: str, half: torch.dtype, kernel: str, device: torch.device) -> None:
    """Usual scores, many tiles, sizes that no tile divides."""
    x = Inputs(device, half, n=70, m=333, d=24, dv=40)
    check(x, BIASES[name](x), kernel)
    check(x, BIASES[name](x), kernel, causal=True, scale=2.0)


@pytest.mark.parametrize("height", [-11.8, -14.6])
def test_many_small_weights_keep_their_bits(
    height: float, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """A sum of tens of thousands says little about the size of its parts."""
    x = Inputs(device, half, batch=(1,), heads=1, n=3, m=40_000)
    x.q, x.k = torch.zeros_like(x.q), torch.zeros_like(x.k)
    x.v = torch.ones_like(x.v)
    check(x, x.bias(steps(x, height)), kernel)


def test_values_near_the_largest_number(
    half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Sums of weights and values stay finite as they do in plain attention."""
    x = Inputs(device, half, batch=(1,), n=70, m=256, d=32)
    x.v = x.v / x.v.abs().max() * torch.finfo(half).max / 16
    check(x, x.bias(steps(x, 0.0, 8.0, 0.0, 0.0)), kernel)


def test_blocks_that_are_computed_again_give_the_same_bits_each_time(
    half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """The second pass over a block starts from nothing that the first has left."""
    x = Inputs(device, half, batch=(2,), n=70, m=256, d=32)
    bias = x.bias(steps(x, 0.0, 400.0, 0.0, 0.0))
    first, second = (flashbias_attention(x.q, x.k, x.v, bias, backend=kernel) for _ in range(2))
    assert torch.equal(first, second)

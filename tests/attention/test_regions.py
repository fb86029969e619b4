"""Regions of shifted windows: most windows are one region, others have up to four."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashbias_convert import Regions
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.window_map import WindowMap

from .cases import Inputs, check


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"cosine": True, "scale": 8.0}], ids=["", "causal", "cosine"]
)
def test_shifted_windows(
    options: dict[str, Any], dtype: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Windows of one region, of two and of four side by side in a batch."""
    shift = 3 if options.get("causal") else 4  # keys in twos, and not
    term = WindowMap(size=(20, 20), window=(10, 10), shift=(4, shift)).regions(device)
    assert [len(window.unique()) for window in term.ids] == [1, 2, 2, 4]
    assert term.pairs == (shift == 4)
    x = Inputs(device, dtype, batch=(2, 4), n=100, heads=1, d=32)
    bias = x.bias(x.low_rank(3), dataclasses.replace(term, value=-3.0))
    check(x, bias, kernel, **options)


@pytest.mark.parametrize(("n", "masked"), [(6, True), (70, False), (70, True), (150, False)])
def test_keys_in_twos_of_one_region(
    n: int, masked: bool, dtype: torch.dtype, kernel: str, device: torch.device
) -> None:
    """The same bits as when each is compared; with a table that is read by twos, or without."""
    x = Inputs(device, dtype, batch=(2,), n=n, heads=1)
    ids = x.integers(3, 2, n // 2).repeat_interleave(2, -1)
    twos = Regions(ids=x.integers(3, 2, n), key_ids=ids, value=-2.0, pairs=True)
    mask = {"key_mask": x.integers(4, 2, n) > 0} if masked else {}
    bias = x.bias(x.rows(x.pairs(2)) if masked else x.low_rank(2), x.rows(twos))
    check(x, bias, kernel, **mask)
    alone = x.bias(bias.terms[0], dataclasses.replace(bias.terms[-1], pairs=False))
    found = [
        flashbias_attention(x.q, x.k, x.v, each, backend=kernel, **mask) for each in (bias, alone)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("where", [0, 70, 1500, 2099])
def test_one_key_apart(where: int, kernel: str, device: torch.device) -> None:
    """In the first tile, within, after a thousand keys and at the end; its scores are large."""
    x = Inputs(device, torch.float16, batch=(2,), n=60, m=2100, heads=1, d=16)
    keys = torch.zeros(2, x.m, dtype=torch.int32, device=device)
    keys[1, where] = 1
    rows = torch.zeros(2, x.n, dtype=torch.int32, device=device)
    x.k[..., where, :] *= 4
    check(x, x.bias(Regions(ids=rows, key_ids=keys, value=-4.0)), kernel)


def test_queries_of_two_regions_and_keys_of_one(kernel: str, device: torch.device) -> None:
    """All pairs of a row are apart or none is; what is constant along a row changes nothing."""
    x = Inputs(device, torch.float16, batch=(), n=20, m=150, heads=1)
    rows = (torch.arange(x.n, device=device) > 9).int()
    keys = torch.zeros(x.m, dtype=torch.int32, device=device)
    check(x, x.bias(Regions(ids=rows, key_ids=keys, value=-3.0)), kernel)


@pytest.mark.parametrize("side", ["padding", "holes"])
@pytest.mark.parametrize("regions", [1, 3])
def test_with_a_mask_of_keys(
    regions: int, side: str, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    x = Inputs(device, half, batch=(2,), n=70, m=300, heads=1, d=32)
    mask = torch.ones(2, x.m, dtype=torch.bool, device=device)
    mask[0, 200:], mask[1, :90] = False, False
    if side == "holes":
        mask[:, 120:150] = False
    ids = Regions(ids=x.integers(regions, 2, x.n), key_ids=x.integers(regions, 2, x.m), value=-3.0)
    check(x, x.bias(x.low_rank(3), ids), kernel, key_mask=mask)

"""Tiles of a dense bias that the card copies: which biases allow it, and what is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashbias_convert import Dense
from flashbias_convert.attention import descriptors, flashbias_attention
from flashbias_convert.attention.descriptors import TileDescriptor, dense_tiles

from .cases import Inputs, check


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


#: biases, and rows, columns and stride of the matrix that they are
LAYOUTS: dict[str, tuple[Tensor, tuple[int, int, int] | None]] = {
    "contiguous": (zeros(2, 3, 40, 64), (240, 64, 64)),
    "one of a batch": (zeros(3, 40, 64).expand(5, 3, 40, 64), (120, 64, 64)),
    "rows with room": (zeros(3, 40, 72)[..., :61], (120, 61, 72)),
    "part of longer rows": (zeros(3, 80, 64)[:, 8:48, :56], (200, 56, 64)),
    "other precision": (zeros(3, 40, 64).float(), None),
    "heads within rows": (zeros(40, 3, 64).transpose(0, 1), None),
    "columns apart": (zeros(3, 40, 64, 2)[..., 0], None),
    "one row for all": (zeros(3, 1, 64).expand(3, 40, 64), None),
    "rows that overlap": (zeros(1024).as_strided((3, 40, 64), (0, 16, 1)), None),
    "rows that start anywhere": (zeros(3, 40, 61), None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bias_is_one_matrix_or_none(name: str) -> None:
    dense, expected = LAYOUTS[name]
    found = dense_tiles(dense, 16, 32)
    assert found == (None if expected is None else TileDescriptor(*expected, (16, 32)))


def test_more_rows_than_coordinates_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = LAYOUTS["contiguous"][0]
    monkeypatch.setattr(descriptors, "_MOST_ROWS", 239)
    assert dense_tiles(dense, 16, 32) is None


def test_cards_that_copy_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_copies_tiles", lambda device: False)
    assert dense_tiles(LAYOUTS["contiguous"][0], 16, 32) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (1, 3), (2, 1)])
def test_heads_and_batch_entries(
    batch: tuple[int, ...], causal: bool, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Every head and entry reads its own rows, whatever follows them."""
    x = Inputs(device, half, batch=(2, 3), n=70, m=152, heads=2)
    dense = x.normal(*batch, 2, 70, 152).to(half)
    check(x, x.bias(Dense(bias=dense)), kernel, causal=causal)


def test_what_follows_a_matrix_is_not_read(kernel: str, device: torch.device) -> None:
    """Rows of the next head and columns beyond the last, here NaN, take no part."""
    x = Inputs(device, torch.float16, batch=(1,), n=70, m=90, heads=2)
    wide = x.normal(2, 100, 96).half()
    bias = x.bias(Dense(bias=wide[:, :70, :90].clone()))
    wide[:, 70:], wide[..., 90:] = float("nan"), float("nan")
    inside = x.bias(Dense(bias=wide[:, :70, :90]))
    expected = flashbias_attention(x.q, x.k, x.v, bias, backend=kernel)
    assert torch.equal(flashbias_attention(x.q, x.k, x.v, inside, backend=kernel), expected)


def test_a_bias_that_moves(kernel: str, device: torch.device) -> None:
    """The launch is planned once; tensors of later calls lie elsewhere, aligned or not."""
    x = Inputs(device, torch.float16, n=70, m=96, heads=2)
    room = torch.zeros(8 + 2 * 70 * 96, dtype=torch.float16, device=device)
    for offset in (0, 8, 3, 0):
        values = x.normal(2, 70, 96).half()
        own = room[offset : offset + values.numel()].view_as(values).copy_(values)
        check(x, x.bias(Dense(bias=own)), kernel)

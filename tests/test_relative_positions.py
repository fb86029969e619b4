"""Relative positions are those of the libraries whose tables and layers they look up."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashbias_convert.relative_positions import (
    log_coordinates,
    table_entries,
    window_index,
    window_of,
)
from tests.timm_abilities import needs


@pytest.mark.parametrize(
    ("said", "sides"),
    [(7, (7, 7)), ((7, 8), (7, 8)), ([2, 7, 7], (2, 7, 7)), (torch.Size([3]), (3,))],
)
def test_the_sides_of_a_window(said: Any, sides: tuple[int, ...]) -> None:
    assert window_of(SimpleNamespace(window_size=said)) == sides


@pytest.mark.parametrize("sides", [(3,), (3, 4), (2, 3, 4)])
def test_the_index_tells_offsets_apart(sides: tuple[int, ...]) -> None:
    """An entry for each offset, the last axis fastest, from the last key to the first."""
    index = window_index(sides)
    places = list(itertools.product(*map(range, sides)))
    for (i, query), (j, key) in itertools.product(enumerate(places), repeat=2):
        entry = 0
        for side, at, other in zip(sides, query, key, strict=True):
            entry = entry * (2 * side - 1) + at - other + side - 1
        assert index[i, j] == entry
    assert len(index.unique()) == int(index.max()) + 1 == table_entries(sides)
    assert table_entries(()) == 0


@pytest.mark.parametrize("sides", [(4, 4), (2, 5)])
def test_the_index_is_that_of_swin(sides: tuple[int, int]) -> None:
    swin = pytest.importorskip("timm.models.swin_transformer")
    assert torch.equal(window_index(sides), swin.get_relative_position_index(*sides))


@pytest.mark.parametrize("trained", [None, (6, 12)])
@pytest.mark.parametrize("sides", [(8, 8), (2, 5), (1, 3)])
def test_coordinates_of_a_window(sides: tuple[int, int], trained: tuple[int, int] | None) -> None:
    swin = pytest.importorskip("timm.models.swin_transformer_v2")
    theirs = swin.WindowAttention(
        8, sides, 2, pretrained_window_size=trained or (0, 0)
    ).relative_coords_table
    needs(bool(theirs.isfinite().all()), "coordinates of windows that are one wide")
    # a quotient, a product, a sum, a logarithm and a quotient, each rounded to float32, below 2
    atol = 5 * torch.finfo(torch.float32).eps
    found = log_coordinates(sides, trained)
    torch.testing.assert_close(found, theirs.double(), rtol=0, atol=atol)

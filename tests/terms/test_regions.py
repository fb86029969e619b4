"""A constant for pairs of different regions, and timm's shift mask."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from flashbias_convert.decompose import regions
from flashbias_convert.terms import Regions
from flashbias_convert.terms.regions import are_in_twos
from flashbias_convert.window_map import WindowMap
from tests.timm_abilities import CUTS_ANY_MAP, needs, works


def test_pairs_of_different_regions_get_the_value_and_others_none() -> None:
    dense = Regions(ids=torch.tensor([0, 0, 2]), value=-5.0).dense(3, 3)
    assert dense.tolist() == [[[0, 0, -5], [0, 0, -5], [-5, -5, 0]]]


def test_keys_may_have_regions_of_their_own() -> None:
    term = Regions(ids=torch.tensor([1, 2]), key_ids=torch.tensor([2, 1, 7]), value=3.0)
    assert term.dense(2, 3).tolist() == [[[3, 0, 3], [0, 3, 3]]]


def test_each_window_has_its_own_ids() -> None:
    ids = torch.tensor([[0, 1, 0], [4, 4, 4]], dtype=torch.uint8)
    term = Regions(ids=ids)
    dense = term.dense(3, 3)
    assert dense.shape == (2, 1, 3, 3) and term.batch_shape() == (2,)
    for w in range(2):
        for i in range(3):
            for j in range(3):
                assert dense[w, 0, i, j] == (-100.0 if ids[w, i] != ids[w, j] else 0.0)


def test_a_row_scale_multiplies_rows_of_each_head() -> None:
    term = Regions(
        ids=torch.tensor([0, 1]), value=-2.0, row_scale=torch.tensor([[1.0, 3.0], [0.5, 0.0]])
    )
    assert term.dense(2, 2).tolist() == [[[0, -2], [-6, 0]], [[0, -1], [0, 0]]]
    assert term.num_own_heads() == 2


def window_ids(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> torch.Tensor:
    """Which of the 3 x 3 parts of the rolled map each token of each window comes from."""

    def part(at: int, axis: int) -> int:
        return (at >= size[axis] - window[axis]) + (at >= size[axis] - shift[axis])

    windows = []
    for top in range(0, size[0], window[0]):
        for left in range(0, size[1], window[1]):
            tokens = [(top + y, left + x) for y in range(window[0]) for x in range(window[1])]
            windows.append([3 * part(y, 0) + part(x, 1) for y, x in tokens])
    return torch.tensor(windows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [
        ((8, 8), (4, 4), (2, 2)),
        ((12, 8), (4, 4), (1, 3)),
        ((6, 9), (2, 3), (1, 1)),
        ((7, 10), (4, 4), (2, 2)),
        ((4, 8), (4, 4), (2, 2)),
    ],
    ids=["square", "uneven-shift", "rectangular", "padded", "one-axis"],
)
def test_it_is_the_shift_mask_of_timm(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> None:
    swin = pytest.importorskip("timm.models.swin_transformer_v2")

    def make() -> Any:
        return swin.SwinTransformerV2Block(8, size, 1, window_size=window, shift_size=shift)

    needs(works(make), CUTS_ANY_MAP)
    block = make()
    mask = block.get_attn_mask()
    padded = tuple(math.ceil(s / w) * w for s, w in zip(size, window, strict=True))
    ids = window_ids((padded[0], padded[1]), block.window_size, block.shift_size)
    n = block.window_area
    assert mask.shape == (len(ids), n, n) and (mask != 0).any()
    assert torch.equal(Regions(ids=ids).dense(n, n)[:, 0], mask)


def test_ids_stay_integers() -> None:
    term = Regions(ids=torch.tensor([0, 1], dtype=torch.uint8), key_ids=torch.tensor([0, 1]))
    half = term.to(dtype=torch.float16)
    assert half.key_ids is not None
    assert (half.ids.dtype, half.key_ids.dtype) == (torch.uint8, torch.int64)


def test_what_does_not_fit_is_refused_by_name() -> None:
    ids = torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"^ids must hold integers, got torch.float32"):
        Regions(ids=ids.float())
    with pytest.raises(TypeError, match=r"^key_ids must hold integers, got torch.bool"):
        Regions(ids=ids, key_ids=ids.bool())
    with pytest.raises(ValueError, match=r"^ids must have shape"):
        Regions(ids=torch.tensor(1))
    with pytest.raises(ValueError, match=r"^key_ids must have shape"):
        Regions(ids=ids, key_ids=torch.tensor(1))
    with pytest.raises(ValueError, match="regions: ids is for 2 queries, the call has 3"):
        Regions(ids=ids).dense(3, 2)
    with pytest.raises(ValueError, match="regions: key_ids is for 2 keys, the call has 3"):
        Regions(ids=ids).dense(2, 3)


def test_keys_in_twos() -> None:
    twos, apart = torch.tensor([[0, 0, 2, 2], [1, 1, 1, 1]]), torch.tensor([[0, 2, 2, 0]])
    for keys, known in ((twos, True), (apart, False), (twos[..., :3], False)):
        assert are_in_twos(keys) is known
        Regions(ids=apart, key_ids=keys).check_codes()
        claimed = Regions(ids=apart, key_ids=keys, pairs=True)
        if known:
            claimed.check_codes()
        else:
            with pytest.raises(ValueError, match="not in twos of one region"):
                claimed.check_codes()
    own = Regions(ids=twos, pairs=True)
    own.check_codes()
    kept = Regions.from_state(json.loads(json.dumps(own.static())), own.tensors())
    assert kept.pairs
    earlier = {name: value for name, value in own.static().items() if name != "pairs"}
    assert not Regions.from_state(earlier, own.tensors()).pairs  # of files before


@pytest.mark.parametrize(
    ("size", "window", "shift", "twos"),
    [
        ((16, 16), (8, 8), (4, 4), True),
        ((14, 14), (7, 7), (3, 3), False),
        ((16, 24), (4, 12), (3, 6), True),  # rows are parted anywhere
        ((16, 24), (4, 12), (3, 5), False),
        ((10, 13), (4, 6), (2, 2), True),  # padded
        ((8, 8, 14), (2, 4, 7), (1, 2, 0), False),
        ((8, 8, 16), (3, 3, 4), (1, 1, 2), True),
    ],
)
def test_maps_know_whether_keys_come_in_twos(
    size: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], twos: bool
) -> None:
    term = WindowMap(size, window, shift).regions(torch.device("cpu"))
    assert term.pairs is twos
    term.check_codes()
    found = regions(term.dense_term(math.prod(window), math.prod(window), 0, torch.float32)[:, 0])
    assert found is not None and found.pairs is are_in_twos(term.ids)
    found.check_codes()

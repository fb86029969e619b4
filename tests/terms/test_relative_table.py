"""Look-ups at the sum of two codes: 1-D buckets and 2-D windows."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbias_convert.terms import RelativeTable
from flashbias_convert.terms.relative_table import are_pairs, distance_direction

from .builders import Maker


def bucket(distance: int, buckets: int = 8, largest: int = 16) -> int:
    """T5's bidirectional bucket of key position minus query position."""
    half = buckets // 2
    sign = half if distance > 0 else 0
    near, distance = half // 2, abs(distance)
    if distance < near:
        return sign + distance
    step = math.log(distance / near) / math.log(largest / near) * (half - near)
    return sign + min(near + int(step), half - 1)


def test_the_buckets_of_t5_become_one_table_of_distances() -> None:
    n, m = 6, 9
    weight = Maker().numbers(8, 2)  # an embedding: bucket, head
    table = torch.stack([weight[bucket(d)] for d in range(1 - n, m)], -1)
    u, v = torch.arange(n - 1, -1, -1), torch.arange(m)
    dense = RelativeTable(table=table, u=u, v=v).dense(n, m)
    assert dense.shape == (2, n, m)
    for h in range(2):
        for i in range(n):
            for j in range(m):
                assert dense[h, i, j] == weight[bucket(j - i), h]


@settings(deadline=None)  # the first example imports timm
@given(st.integers(1, 4), st.integers(1, 4))
def test_the_windows_of_timm_become_codes_per_token(height: int, width: int) -> None:
    swin = pytest.importorskip("timm.models.swin_transformer")
    n, size = height * width, (2 * height - 1) * (2 * width - 1)
    table = Maker().numbers(3, size)
    y, x = (torch.arange(n) // width, torch.arange(n) % width)
    u = (y + height - 1) * (2 * width - 1) + x + width - 1
    v = -(y * (2 * width - 1) + x)
    term = RelativeTable(table=table, u=u, v=v)
    term.check_codes()
    index = swin.get_relative_position_index(height, width)
    assert torch.equal(term.dense(n, n), table[:, index])


def test_codes_of_any_integer_type_and_negative_ones() -> None:
    table = torch.tensor([[10.0, 11.0, 12.0]])
    u, v = torch.tensor([200, 201], dtype=torch.uint8), torch.tensor([-200, -199]).short()
    assert RelativeTable(table=table, u=u, v=v).dense(2, 2).tolist() == [[[10, 11], [11, 12]]]


def test_a_table_per_window_type() -> None:
    table = Maker().numbers(2, 3, 1, 5)
    term = RelativeTable(table=table, u=torch.tensor([0, 2]), v=torch.tensor([0, 1, 2]))
    dense = term.dense(2, 3)
    assert dense.shape == (2, 3, 1, 2, 3) and term.batch_shape() == (2, 3)
    assert torch.equal(dense[1, 2, 0, 1], table[1, 2, 0, 2:5])


def test_a_row_scale_multiplies_rows() -> None:
    """The gate of WavLM: one table for all heads, gated by each head's queries."""
    x = Maker()
    table, gate = x.numbers(1, 8), x.numbers(2, 3, 4)
    u, v = torch.tensor([3, 2, 1, 0]), torch.arange(5)
    term = RelativeTable(table=table, u=u, v=v, row_scale=gate)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 4, 5) and term.num_own_heads() == 3
    for i in range(4):
        for j in range(5):
            assert torch.equal(dense[:, :, i, j], gate[:, :, i] * table[0, 3 - i + j])


def test_float64_keeps_every_bit() -> None:
    table = torch.full((1, 1), 1 + 2.0**-40, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.int64)
    dense = RelativeTable(table=table, u=zero, v=zero).dense(1, 1, dtype=torch.float64)
    assert dense.item() == 1 + 2.0**-40


def test_tables_and_codes_keep_their_dtypes() -> None:
    codes = torch.zeros(2, dtype=torch.int16)
    half = RelativeTable(table=torch.zeros(1, 1), u=codes, v=codes).to(dtype=torch.bfloat16)
    assert (half.table.dtype, half.u.dtype, half.v.dtype) == (
        torch.float32,
        torch.int16,
        torch.int16,
    )


@pytest.mark.parametrize(
    ("u", "v", "message"),
    [
        ([0, 3], [0, 2], "reach from 0 to 5, but the table has 5 entries"),
        ([0, 1], [-1, 2], "reach from -1 to 3, but the table has 5 entries"),
    ],
)
def test_codes_outside_the_table_are_found(u: list[int], v: list[int], message: str) -> None:
    term = RelativeTable(table=torch.zeros(1, 5), u=torch.tensor(u), v=torch.tensor(v))
    with pytest.raises(ValueError, match=message):
        term.check_codes()


def test_codes_that_just_fit_pass() -> None:
    codes = torch.tensor([0, 2])
    RelativeTable(table=torch.zeros(1, 5), u=codes, v=codes).check_codes()


def test_what_does_not_fit_is_refused_by_name() -> None:
    table, codes = torch.zeros(1, 5), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="table must have shape"):
        RelativeTable(table=table[0], u=codes, v=codes)
    for name in ("u", "v"):
        with pytest.raises(TypeError, match=f"^{name} must hold integers"):
            RelativeTable(table=table, **{"u": codes, "v": codes, name: codes.float()})
        with pytest.raises(ValueError, match=f"^{name} must be one-dimensional"):
            RelativeTable(table=table, **{"u": codes, "v": codes, name: codes[None]})
    term = RelativeTable(table=table, u=codes, v=codes)
    with pytest.raises(ValueError, match="relative_table: u is for 3 queries, the call has 2"):
        term.dense(2, 3)
    with pytest.raises(ValueError, match="relative_table: v is for 3 keys, the call has 4"):
        term.dense(3, 4)


@pytest.mark.parametrize("step", [1, -1])
def test_codes_that_count_distances(step: int) -> None:
    n, m = 6, 9
    values = Maker().numbers(2, n + m - 1)
    rows, keys = torch.arange(n), torch.arange(m)
    u, v = (n - 1 - rows, keys) if step > 0 else (rows, m - 1 - keys)
    assert distance_direction(u, v) == step
    plain = RelativeTable(table=values, u=u, v=v)
    term = RelativeTable.of_codes(values, u, v, step)
    term.check_codes()
    assert torch.equal(term.dense(n, m), plain.dense(n, m))
    assert term.entries == plain.entries == n + m - 1
    assert term.table.shape[-1] == n + m - 1 + 2 * RelativeTable.MARGIN
    kept = RelativeTable.from_state(json.loads(json.dumps(term.static())), term.tensors())
    assert kept.by_distance == step
    chosen = term.select_heads([1])
    assert chosen is not None and chosen.by_distance == step
    with pytest.raises(ValueError, match="do not count distances that way"):
        dataclasses.replace(term, by_distance=-step).check_codes()
    with pytest.raises(ValueError, match=r"reach from -\d+ to"):
        dataclasses.replace(plain, by_distance=step).check_codes()
    with pytest.raises(ValueError, match="must be -1, 0 or 1"):
        dataclasses.replace(plain, by_distance=2)


def test_codes_that_count_no_distances() -> None:
    token = torch.arange(9)
    u = token // 3 * 5 + token % 3
    assert distance_direction(u, u.flip(0)) == 0
    assert distance_direction(token, token) == 0
    values = Maker().numbers(2, 25)
    term = RelativeTable.of_codes(values, u, u.flip(0), 0)
    assert term.by_distance == 0 and torch.equal(term.table, values) and term.entries == 25


@pytest.mark.parametrize(
    ("codes", "paired"),
    [
        ([3, 2, 1, 0], True),
        ([8, 7, 3, 2], True),  # two windows' rows
        ([3, 2, 1], False),
        ([0, 1, 2, 3], False),
        ([3, 2, 2, 1, 1, 0], True),
        ([0, -1], False),
        ([4, 3, 2, 2], False),
    ],
)
def test_keys_in_pairs(codes: list[int], paired: bool) -> None:
    v = torch.tensor(codes)
    u = torch.arange(2) + 1
    term = RelativeTable.of_codes(Maker().numbers(2, 20), u, v)
    assert term.pairs is paired and are_pairs(v) is paired
    kept = RelativeTable.from_state(json.loads(json.dumps(term.static())), term.tensors())
    assert kept.pairs is paired
    earlier = {name: own for name, own in term.static().items() if name != "pairs"}
    assert not RelativeTable.from_state(earlier, term.tensors()).pairs  # of checkpoints before
    claimed = RelativeTable(table=term.table, u=u, v=v, pairs=True)
    if paired:
        claimed.check_codes()
    else:
        with pytest.raises(ValueError, match="not one apart by twos"):
            claimed.check_codes()


def test_distances_are_no_pairs() -> None:
    token = torch.arange(6)
    assert not RelativeTable.of_codes(Maker().numbers(2, 11), token, token.flip(0), -1).pairs


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_small_integers_do_not_wrap(dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    assert not are_pairs(torch.tensor([low, high], dtype=dtype))
    u, v = torch.tensor([high, 1], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    RelativeTable(table=torch.zeros(1, high + 2), u=u, v=v).check_codes()
    with pytest.raises(ValueError, match=f"to {high + 1}, but the table has {high + 1} entries"):
        RelativeTable(table=torch.zeros(1, high + 1), u=u, v=v).check_codes()

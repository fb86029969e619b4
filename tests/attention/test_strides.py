"""Batch dimensions are merged only where every tensor walks them in one step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashbias_convert.attention.strides import collapse_batch


def test_what_can_be_merged() -> None:
    assert collapse_batch([4, 3], [[3, 1], [6, 2]]) == ([12], [[1], [2]])
    assert collapse_batch([4, 3], [[3, 1], [0, 2]]) == ([4, 3], [[3, 1], [0, 2]])
    assert collapse_batch([4, 3], [[0, 0]]) == ([12], [[0]])
    assert collapse_batch([1, 5, 1], [[9, 2, 7]]) == ([5], [[2]])
    assert collapse_batch([], [[]]) == ([], [[]])


@given(
    st.lists(st.integers(1, 4), max_size=5),
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3),
)
def test_merging_keeps_every_offset(batch: list[int], broadcast: list[list[bool]]) -> None:
    strides = []
    for pattern in broadcast:
        shape = [1 if b else s for b, s in zip(pattern, batch, strict=False)]
        own = torch.empty(shape).expand(batch).stride() if batch else ()
        strides.append([0 if s == 1 else t for s, t in zip(batch, own, strict=True)])
    sizes, merged = collapse_batch(batch, strides)

    def offsets(sizes: list[int], steps: list[int]) -> list[int]:
        out = [0]
        for size, step in zip(sizes, steps, strict=True):
            out = [o + i * step for o in out for i in range(size)]
        return out

    for before, after in zip(strides, merged, strict=True):
        assert offsets(batch, before) == offsets(sizes, after)

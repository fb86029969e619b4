"""A table looked up at a code per pair."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import Lookup

from .builders import Maker


def test_each_cell_is_the_entry_at_its_code() -> None:
    x = Maker()
    table, code = x.numbers(3, 6), x.codes(6, 4, 5)
    dense = Lookup(table=table, code=code).dense(4, 5)
    for h in range(3):
        for i in range(4):
            for j in range(5):
                assert dense[h, i, j] == table[h, code[i, j]]


def test_tables_and_codes_broadcast_over_the_batch() -> None:
    """Graphs of a batch share the table; their distances differ."""
    x = Maker()
    table, code = x.numbers(3, 6), x.codes(6, 2, 4, 5)
    term = Lookup(table=table, code=code)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 4, 5) and term.batch_shape() == (2,)
    for b in range(2):
        assert torch.equal(dense[b], table[:, code[b].long()])
    tables = x.numbers(7, 1, 3, 6)
    both = Lookup(table=tables, code=code)
    assert both.dense(4, 5).shape == (7, 2, 3, 4, 5) and both.batch_shape() == (7, 2)
    assert torch.equal(both.dense(4, 5)[6, 1], tables[6, 0][:, code[1].long()])


def test_tables_and_codes_keep_their_dtypes() -> None:
    code = torch.zeros(1, 1, dtype=torch.uint8)
    half = Lookup(table=torch.zeros(1, 1), code=code).to(dtype=torch.float16)
    assert (half.table.dtype, half.code.dtype) == (torch.float32, torch.uint8)


@pytest.mark.parametrize(
    ("code", "message"),
    [([[0, 3]], "reach from 0 to 3, but the table has 3"), ([[-1, 2]], "reach from -1 to 2")],
)
def test_codes_outside_the_table_are_found(code: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookup(table=torch.zeros(1, 3), code=torch.tensor(code)).check_codes()
    Lookup(table=torch.zeros(1, 4), code=torch.tensor([[0, 3]])).check_codes()


def test_what_does_not_fit_is_refused_by_name() -> None:
    table, code = torch.zeros(1, 5), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^table must have shape"):
        Lookup(table=table[0], code=code)
    with pytest.raises(ValueError, match=r"^code must have shape"):
        Lookup(table=table, code=code[0])
    with pytest.raises(TypeError, match=r"^code must hold integers"):
        Lookup(table=table, code=code.float())
    with pytest.raises(ValueError, match="lookup: code is for 3 queries, the call has 2"):
        Lookup(table=table, code=code).dense(2, 4)
    with pytest.raises(ValueError, match="lookup: code is for 4 keys, the call has 5"):
        Lookup(table=table, code=code).dense(3, 5)

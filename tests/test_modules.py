"""The module that holds terms."""

from __future__ import annotations

import copy

import pytest
import torch

from flashbias_convert import Regions, RelativeTable, ScoreBias, modules
from flashbias_convert.mask_memo import MaskMemo
from flashbias_convert.modules import ScoreBiasModule


def make(offset: int = 0) -> ScoreBiasModule:
    at = torch.arange(5)
    term = RelativeTable(table=torch.randn(2, 9), u=at + offset, v=4 - at)
    return ScoreBiasModule(ScoreBias((term,), 2), backend="eager")


def test_codes_outside_the_table_are_refused() -> None:
    """A kernel trusts them: it would read outside the table."""
    make().prepared()
    for offset in (-1, 1):
        with pytest.raises(ValueError, match="the table has 9 entries"):
            make(offset).prepared()


def test_atomics_are_asked_for_by_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy keeps it; a call may say otherwise."""
    asked = []
    monkeypatch.setattr(modules, "flashbias_attention", lambda *_, **k: asked.append(k))
    terms, x = make(), torch.randn(1, 2, 5, 8)
    terms(x, x, x)
    terms.deterministic = False
    copy.deepcopy(terms)(x, x, x)
    terms(x, x, x, deterministic=True)
    assert [k["deterministic"] for k in asked] == [True, False, True]


def test_one_row_of_ids_stands_for_a_mask_that_is_repeated() -> None:
    ids = torch.tensor([[[0, 0, 1], [0, 1, 2]]])  # (1, 2, 3)
    term = Regions(ids=ids)
    mask = term.dense(3, 3).squeeze(-3).expand(4, 2, 3, 3).clone()
    assert MaskMemo().stands_for(term, mask) and MaskMemo().stands_for(term, mask[:1])
    assert MaskMemo().stands_for(Regions(ids=ids.expand(4, 2, 3)), mask)
    mask[3, 1, 0, 1] = 0
    assert not MaskMemo().stands_for(term, mask)


@pytest.mark.parametrize("shape", [(2, 3, 3), (4, 1, 3, 3), (4, 2, 3, 4), (4, 2, 4, 3), (3, 3)])
def test_ids_do_not_stand_for_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    term = Regions(ids=torch.tensor([[[0, 0, 1], [0, 1, 2]]]))
    assert not MaskMemo().stands_for(term, torch.full(shape, -100.0))

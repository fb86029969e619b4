"""The module that holds terms."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import RelativeTable, ScoreBias
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

"""How much is tried: a little in every run of the tests, all of it in `make abuse`."""

from __future__ import annotations

import os

#: set FLASHBIAS_ABUSE=full for the full counts
FULL = os.environ.get("FLASHBIAS_ABUSE") == "full"


def amount(few: int, many: int) -> int:
    """`few` in the unit tests, `many` in `make abuse`."""
    return many if FULL else few

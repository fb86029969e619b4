"""Stands in for `turns.in_turns`: jobs run in this process, so that tests can look into them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from turns import carry_out


def in_turns_here(
    job: Any,
    calls: list[Any],
    *,
    together: int | None = None,
    seconds: float | None = None,
    timed: bool = True,
) -> list[Any]:
    """The calls that were lost: a job that raises SystemExit has died."""
    if seconds is not None and seconds < 0:
        return list(calls)
    lost = []
    for call in calls:
        try:
            carry_out(job, call, lambda: None)
        except SystemExit:
            lost.append(call)
    return lost

"""One real model for every recipe."""
from __future__ import annotations
from .case import Case
def cases(tiny: bool = False) -> dict[str, Case]:
    return {}

"""What a recipe says of itself in the table of supported architectures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """One row of the table in the README, which `scripts/supported_table.py` writes.

    Attributes:
        models: which models, and of which library where the name does not say so.
        exact: masks, closed forms, and whatever else of the scores is as in the original.
        refused: why no site of it is converted; "" if sites are.
        truncated: what of the bias may be lost; "nothing" where every term is exact.
        n: tokens of one attention call, in words: queries, or queries x keys where they differ.
        tested: what the recipe was tested with, where a version of its library does not say it.
    """

    models: str
    exact: str = ""
    refused: str = ""
    truncated: str = "nothing"
    n: str = "any"
    tested: str = ""

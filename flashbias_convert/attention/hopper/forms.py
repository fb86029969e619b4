"""The forms that the kernel is compiled in; nothing here imports Triton.

A form travels through the kernel as one integer, since Gluon's partitions take numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: what is added element by element: nothing, ALiBi's slope times a distance, a number of a key, an
#: entry of a table by distance, which rises with the key or falls
NO_BIAS, ALIBI, KEY_BIAS, RISING, FALLING = range(5)
#: of the integer: name, bits, unit
FIELDS = (
    ("HEAD", 4, 16), ("COLUMNS", 4, 16), ("KEYS", 4, 16), ("STAGES", 3, 1), ("GROUPS", 2, 1),
    ("OVERLAP", 1, 1), ("TURNS", 1, 1), ("CAUSAL", 1, 1), ("BIAS", 3, 1), ("QUICK", 1, 1),
    ("AGAIN", 1, 1), ("TAIL", 3, 16), ("REACH", 1, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How a call is computed.

    Attributes:
        head: numbers of a query, a key and a value.
        columns: padded number of columns of factors.
        keys: of a tile.
        stages: tiles of keys, and of values, under way.
        groups: math warpgroups of a program, of 64 queries each.
        overlap: the product of weights and values runs while the next weights are computed.
        turns: warpgroups take turns to ask for products.
        causal: keys after a query are hidden.
        bias: one of `NO_BIAS`, `ALIBI`, `KEY_BIAS`, `RISING`, `FALLING`.
        quick: only the first tile sets the level of a row; rows where that is no good are marked.
        again: compute only blocks of queries with marks.
        tail: most keys of the last tile, where they are few; 0: as many as elsewhere.
        reach: of ALiBi, skip keys that are too far away to have any weight.
        most_registers: of a thread at the launch, before they are shared out anew; None: no limit.
        math_registers: of a thread of math warpgroups but the first.
        copy_registers: of a thread of the warp that copies.
    """

    head: int
    columns: int = 0
    keys: int = 128
    stages: int = 2
    groups: int = 2
    overlap: bool = True
    turns: bool = True
    causal: bool = False
    bias: int = NO_BIAS
    quick: bool = True
    again: bool = False
    tail: int = 0
    reach: bool = False
    most_registers: int | None = None
    math_registers: int = 240
    copy_registers: int = 24

    @property
    def queries(self) -> int:
        """Of a program."""
        return 64 * self.groups

    def code(self) -> int:
        """All that the kernel is compiled for, in one integer.

        Raises:
            ValueError: a number that does not fit.
        """
        code, at = 0, 0
        for name, bits, unit in FIELDS:
            number = int(getattr(self, name.lower()))
            if number % unit or not 0 <= number // unit < 1 << bits:
                raise ValueError(f"{name.lower()} of a form cannot be {number}")
            code |= number // unit << at
            at += bits
        return code


def read(code: int, name: str) -> int:
    """One number of a form's code."""
    at = 0
    for field, bits, unit in FIELDS:
        if field == name:
            return (code >> at & (1 << bits) - 1) * unit
        at += bits
    raise KeyError(name)


#: programs beside each other: with small tiles two, of one warpgroup two, or with both three
BESIDE: dict[str, Any] = {
    "keys": 64, "overlap": False, "turns": False, "most_registers": 80, "math_registers": 104,
}  # fmt: skip
ALONE: dict[str, Any] = {"groups": 1, "turns": False, "most_registers": 128}
SMALL: dict[str, Any] = {
    "keys": 64, "groups": 1, "overlap": False, "turns": False, "most_registers": 80,
}  # fmt: skip

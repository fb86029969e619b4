"""Cards with less memory on the chip than the one that launch settings were measured on.

Whether settings fit is known when a kernel is first launched: Triton refuses what takes too much.
Smaller settings are tried then, always the same ones in the same order, so that the same call has
the same settings in every process on such a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lacks_room(problem: BaseException) -> bool:
    """Whether a launch failed because its program takes more than one of the card may have."""
    from triton.runtime.errors import OutOfResources

    return isinstance(problem, OutOfResources)


def most_bytes(sizes: Mapping[str, Any], *, stages: int, element: int, cell: int) -> int:
    """What a program of the inference kernel takes at most of a card's memory on the chip, bytes.

    For launches that nobody tries again, since a graph has them.

    Args:
        sizes: of its tiles, by the names of the kernel's arguments.
        stages: depth of the software pipeline.
        element: bytes of an element of q.
        cell: bytes that terms have for a pair of a query and a key.
    """
    width = sizes["BLOCK_D"] + sizes["COLUMNS"]
    step = sizes["BN"] * ((width + sizes["BLOCK_DV"]) * element + sizes["BM"] * cell)
    return int(stages * step + sizes["BM"] * (width + sizes["BN"]) * 4)

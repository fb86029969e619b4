"""Cards with less memory on the chip than the one that launch settings were measured on.

Whether settings fit is known when a kernel is first launched: Triton refuses what takes too much.
Smaller settings are tried then, always the same ones in the same order, so that the same call has
the same settings in every process on such a card.
"""

from __future__ import annotations


def lacks_room(problem: BaseException) -> bool:
    """Whether a launch failed because its program takes more than one of the card may have."""
    from triton.runtime.errors import OutOfResources

    return isinstance(problem, OutOfResources)

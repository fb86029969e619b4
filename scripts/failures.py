"""What a failure says of the one that failed, and what it says of others on the card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import torch
from turns import BESIDE

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
#: in the words of torch's allocator: what was asked for, all that there is, and what this process
#: has of it, where the driver knows (in a container it may not), else what the allocator has
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_OF_ALLOCATOR = (
    re.compile(rf"the allocated memory {_SIZE} is allocated by PyTorch"),
    re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
)
#: more than any card has
_ABSURD = "Tried to allocate more than"
#: of Triton, CUDA, cuBLAS and cuDNN, which do not say how much they wanted
_LACKED = ("out of memory", "ALLOC_FAILED")
#: the state of a peer whose failure is no result
LACKED = "memory lacked beside other commands"
_LOST = ("illegal memory access", "unspecified launch failure", "misaligned address",
         "device-side assert", "illegal instruction")  # fmt: skip


def lacked_beside_others(problem: BaseException) -> bool:
    """Whether memory lacked that other programs on the card may have held.

    What stands still beside a measurement (`turns.alone`) keeps its memory. Such a failure is no
    result: it is printed, and no row, so that the next run tries again. It is a result without
    `beside.py`, and where torch says that the whole card would not do.
    """
    if os.environ.get(BESIDE) is None:
        return False
    texts = [str(each) for each in _chain(problem)]
    lacked = any(isinstance(each, torch.OutOfMemoryError) for each in _chain(problem))
    lacked |= any(word in text for text in texts for word in _LACKED)
    return lacked and not any(_is_too_much(text) for text in texts)


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """A failure and those that led to it: compilers wrap what they catch."""
    seen: list[BaseException] = []
    each: BaseException | None = problem
    while each is not None and each not in seen:
        seen.append(each)
        each = each.__cause__ or each.__context__
    yield from seen


def _is_too_much(text: str) -> bool:
    """Whether the whole card lacks what was asked for, beside what this process has already."""
    if _ABSURD in text:
        return True
    asked, total = _ASKED.search(text), _TOTAL.search(text)
    if asked is None or total is None:
        return False
    in_use = _IN_USE.search(text)
    has = [in_use] if in_use else [pattern.search(text) for pattern in _OF_ALLOCATOR]
    least = sum(_bytes(found, -1) for found in (asked, *has) if found is not None)
    return least > _bytes(total, 1)


def _bytes(found: re.Match[str], side: int) -> float:
    """At least (-1) or at most (1): the message has two digits behind the point."""
    number, unit = float(found[1]), found[2]
    rounding = 0.0 if unit == "bytes" else 0.005
    return (number + side * rounding) * _UNITS[unit]


def is_lost(problem: BaseException | str) -> bool:
    """Whether nothing can run on the card any more in this process, by what it says."""
    return any(word in str(problem) for word in _LOST)


def no_row(what: str, problem: BaseException) -> str:
    """A sentence about a failure that is no row."""
    first = (str(problem).splitlines() or [type(problem).__name__])[0]
    return f"{what}: no row, {LACKED} ({first[:160]})"


def state_of_row(what: str, problem: BaseException) -> str | None:
    """A failure as a row has it, or None if others had the memory, which is none; printed."""
    if lacked_beside_others(problem):
        print(no_row(what, problem), flush=True)
        return None
    first = (str(problem).splitlines() or [""])[0]
    print(what, first[:100], flush=True)
    return f"{type(problem).__name__}: {first}"[:120]

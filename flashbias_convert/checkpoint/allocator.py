"""What the C library does with memory that was freed: it keeps it for later, unless it is told."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: of mallopt in glibc
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: what glibc's own threshold starts with, and how far it rises
_LEAST, _MOST = 2**17, 2**25
#: how users of glibc choose thresholds themselves
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def give_back() -> None:
    """Hand memory that was freed back to the system: the C library keeps it for later."""
    trim = getattr(_C, "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


@contextmanager
def blocks_apart(size: int) -> Iterator[None]:
    """Inside, a block of memory of `size` bytes or more goes back to the system once it is freed.

    So do blocks of 32 MiB, whatever `size` is, and smaller ones than 128 KiB never. glibc begins
    like that, but each time that a block is freed it keeps blocks of up to this size from then on:
    they lie on one heap with all that is small, and a hole between what stays may fit none of the
    blocks to come. How much of the heap is holes depends on what was allocated before, and differs
    from run to run. Holes that are there already are still filled, and kept.

    It holds for all threads, and glibc cannot be asked what it did before. Afterwards it keeps
    blocks of up to 32 MiB, as it would by itself after one of that size. Nothing is done where the
    environment sets these thresholds, or where the C library is another.
    """
    size = min(max(size, _LEAST), _MOST)
    with _LOCK:
        _inside.append(size)
        _tell()
    try:
        yield
    finally:
        with _LOCK:
            _inside.remove(size)
            _tell()


def _tell() -> None:
    """Let the C library keep what is smaller than everyone inside has asked for."""
    tell = getattr(_C, "mallopt", None)
    if tell is None or _is_chosen():
        return
    size = min(_inside, default=_MOST)
    tell(_M_MMAP_THRESHOLD, size)
    tell(_M_TRIM_THRESHOLD, 2 * size)  # glibc's own ratio


def _is_chosen() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _CHOSEN) or any(
        name in tunables for name in _TUNABLES
    )


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has none of that name
        return None


_C = _c_library()
_LOCK = threading.Lock()
#: the sizes of all that are inside `blocks_apart`
_inside: list[int] = []

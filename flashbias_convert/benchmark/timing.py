"""Time and memory of a call, on a card or on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: calls that are not timed, after the first one
WARMUP = 3
#: fewest timed calls, whatever the budget
FEWEST = 3
#: more than the second-level cache of any card: what is written between calls, so that no call
#: finds the inputs of the one before in the cache
_FLUSH_BYTES = 2**28


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call.

    Attributes:
        median_ms, p20_ms, p80_ms: quantiles.
        repeats: how many calls were timed.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Times:
        """The quantiles of some times."""
        low, middle, high = (float(x) for x in np.quantile(milliseconds, [0.2, 0.5, 0.8]))
        return cls(middle, low, high, len(milliseconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Measured:
    """A call that was timed.

    Attributes:
        times: of calls, what Python does for a call included.
        peak_mib: most memory of the card that a call needs, and what was made for it beforehand,
            such as dense biases; weights and inputs do not count. None on the CPU, where it is not
            measured.
        first_call_s: seconds that the first call took, what it compiles included.
    """

    times: Times
    peak_mib: float | None
    first_call_s: float


def measure(
    call: Callable[[], Any],
    device: torch.device,
    *,
    repeats: int,
    before: int = 0,
    budget_s: float | None = None,
    look: Callable[[Any], None] | None = None,
) -> Measured:
    """Run a call a few times.

    Args:
        call: runs on `device`.
        device: CUDA is timed with events, after a write that flushes the cache; anything else with
            the clock.
        repeats: calls to time.
        before: bytes of the card that do not count, see `allocated`.
        budget_s: no further call is timed after so many seconds, but for the fewest.
        look: gets what the first call returned.
    """
    started = time.perf_counter()
    result = call()
    _synchronize(device)
    first = time.perf_counter() - started
    if look is not None:
        look(result)
    del result
    slow = budget_s is not None and first > budget_s
    for _ in range(1 if slow else WARMUP):
        call()
    peak = _peak_mib(call, device, before)
    timed = _on_card if device.type == "cuda" else _on_clock
    spent, found = time.perf_counter(), []
    for milliseconds in timed(call, repeats, device):
        found.append(milliseconds)
        over = budget_s is not None and time.perf_counter() - spent > budget_s
        if over and len(found) >= FEWEST:
            break
    return Measured(Times.of(found), peak, first)


def _on_clock(call: Callable[[], Any], repeats: int, device: torch.device) -> Iterator[float]:
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        yield 1e3 * (time.perf_counter() - start)


def _on_card(call: Callable[[], Any], repeats: int, device: torch.device) -> Iterator[float]:
    with torch.cuda.device(device):
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(repeats):
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            yield float(start.elapsed_time(end))


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a card; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak_mib(call: Callable[[], Any], device: torch.device, before: int) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Outputs that are compared, times, and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from turns import alone

from .working import barrier


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> Tensor:
    """Logits."""
    out = model(x)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def judged(two: Tensor, one: Tensor, truth: Tensor) -> dict[str, Any]:
    """Errors of both against float64; two may be twice as far off as one, and one unit more."""
    unit = torch.finfo(one.dtype).eps * float(truth.abs().max())
    errors = {"two": (two.double() - truth).abs(), "one": (one.double() - truth).abs()}
    largest = {k: float(e.max()) for k, e in errors.items()}
    mean = {k: float(e.square().mean().sqrt()) for k, e in errors.items()}
    finite = all(bool(x.isfinite().all()) for x in (two, one, truth))
    close = all(e["two"] <= 2 * e["one"] + unit for e in (largest, mean))
    passed = finite and close and two.shape == one.shape
    return {
        "status": "passed" if passed else "failed",
        "reason": "" if passed else "the outputs differ by more than rounding",
        "same_bits": torch.equal(two, one),
        **{f"max_error_{k}": f"{v:.3g}" for k, v in largest.items()},
        **{f"rms_error_{k}": f"{v:.3g}" for k, v in mean.items()},
    }


def timed(
    call: Callable[[], Any],
    repeats: int,
    place: torch.device,
    before: Callable[[], Any] = lambda: None,
    warm: int = 2,
) -> float:
    """Median of the seconds of a call; `before` each of them the processes may meet."""
    taken = []
    with _quiet(place):
        for turn in range(repeats + warm):
            before()
            synchronise(place)
            started = time.perf_counter()
            call()
            synchronise(place)
            if turn >= warm:
                taken.append(time.perf_counter() - started)
    return statistics.median(taken)


@contextmanager
def _quiet(place: torch.device) -> Iterator[None]:
    """Both processes measure while what `beside.py` runs beside them waits: the first one asks."""
    pair = dist.is_initialized()
    with alone() if not pair or dist.get_rank() == 0 else nullcontext():
        if pair:
            barrier(place)
        yield
        if pair:
            barrier(place)


def synchronise(place: torch.device) -> None:
    """Wait for a device; for all cards, if it has no number.

    A process of a pair must not touch the other's card: it would take memory and time there.
    """
    if place.type == "cuda":
        for at in range(torch.cuda.device_count()) if place.index is None else [place.index]:
            torch.cuda.synchronize(at)


def times(one: float, two: float, samples: int) -> dict[str, Any]:
    """As columns of the table."""
    return {
        "seconds_one": f"{one:.6f}",
        "seconds_two": f"{two:.6f}",
        "two_over_one": f"{two / one:.3f}",
        "samples": samples,
    }


def held(model: nn.Module) -> int:
    """Bytes of parameters and buffers on the device that has most of them."""
    places: dict[torch.device, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        local: Any = tensor
        local = local.to_local() if hasattr(local, "to_local") else local
        if not local.is_meta:
            places[local.device] = places.get(local.device, 0) + local.nbytes
    return max(places.values(), default=0)


def peak(call: Callable[[], Any], place: torch.device) -> int | None:
    """Most bytes on this process's card during a call, beyond what was there; None on the CPU."""
    if place.type != "cuda":
        call()
        return None
    synchronise(place)
    torch.cuda.reset_peak_memory_stats(place)
    before = torch.cuda.memory_allocated(place)
    call()
    synchronise(place)
    return torch.cuda.max_memory_allocated(place) - before


def megabytes(name: str, count: int | None) -> dict[str, str]:
    """As a column of the table."""
    return {name: "" if count is None else f"{count / 1e6:.2f}"}

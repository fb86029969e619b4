"""Time settings launch by launch, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..attention import launch
from ..attention.room import lacks_room
from ..attention.tuning import LaunchSettings, LaunchShape
from .candidates import candidates
from .record import Launch

#: Settings must be faster than the rule's by this much to replace them: less is noise.
WORTHWHILE = 0.97

#: runs a launch a few times; milliseconds of one
Clock = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Tuned:
    """What was measured for one shape.

    Attributes:
        shape: the class.
        rule_ms: with the settings of the rule.
        best_ms: with `settings`.
        settings: the fastest, or those of the rule where no others are clearly faster.
        tried: how many settings ran.
        failed: settings that do not run on this card, with the reason.
    """

    shape: LaunchShape
    rule_ms: float
    best_ms: float
    settings: LaunchSettings
    tried: int
    failed: dict[LaunchSettings, str] = field(default_factory=dict)


def tune_launches(
    launches: Iterable[Launch],
    *,
    clock: Clock | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Tuned]:
    """Measure the candidates of every launch; settings in use do not change.

    Args:
        launches: from `recorded_launches`.
        clock: how to time a launch; default CUDA events.
        progress: called with settings done, settings in all, and the shape.

    Returns:
        One result for each launch.
    """
    launches = list(launches)
    everything = [candidates(each.shape) for each in launches]
    total, done, found = sum(map(len, everything)), 0, []
    for each, settings in zip(launches, everything, strict=True):
        times: dict[LaunchSettings, float] = {}
        failed: dict[LaunchSettings, str] = {}
        for one in settings:
            try:
                times[one] = _time(each, one, clock or _on_card)
            except Exception as problem:  # too much shared memory, say: the others still count
                failed[one] = str(problem).splitlines()[0][:200] if str(problem) else repr(problem)
            done += 1
            if progress is not None:
                progress(done, total, f"{each.shape.n} x {each.shape.d}")
        usual = _usual(each, settings[0], times, failed, clock or _on_card)
        found.append(_best(each.shape, usual, times, failed))
    return found


def _usual(
    each: Launch,
    rule: LaunchSettings,
    times: dict[LaunchSettings, float],
    failed: dict[LaunchSettings, str],
    clock: Clock,
) -> LaunchSettings:
    """What a call is launched with here, which is measured: the rule's settings, or the first
    smaller ones that the card has room for.

    Raises:
        Exception: none of them run.
    """
    while rule not in times:
        try:
            times[rule] = _time(each, rule, clock)
            failed.pop(rule, None)
        except Exception as problem:
            smaller = rule.smaller() if lacks_room(problem) else None
            if smaller is None:
                raise RuntimeError(
                    f"the kernel does not run on this card: {str(problem).splitlines()[0][:200]}"
                ) from problem
            rule = smaller
    return rule


def _time(each: Launch, settings: LaunchSettings, clock: Clock) -> float:
    with launch.forced(settings):
        return clock(each.run)


def _best(
    shape: LaunchShape,
    rule: LaunchSettings,
    times: dict[LaunchSettings, float],
    failed: dict[LaunchSettings, str],
) -> Tuned:
    best = min(times, key=lambda s: times[s])
    if times[best] > WORTHWHILE * times[rule]:
        best = rule
    return Tuned(shape, times[rule], times[best], best, len(times), failed)


def _on_card(call: Callable[[], None]) -> float:
    """Median milliseconds of CUDA graph replays: no gaps between launches."""
    from triton.testing import do_bench_cudagraph

    call()
    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(call, rep=30, return_mode="median"))

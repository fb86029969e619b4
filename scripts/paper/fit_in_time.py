"""Fits that end in time: how many steps there is time for is measured with the first ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median

from flashbias_convert.decompose.neural import Check, FitResult
from flashbias_convert.decompose.neural_options import FitOptions

#: runs a fit with these options, and calls back after every check
Fit = Callable[[FitOptions, Callable[[Check], None]], FitResult]
#: steps between checks of the two short fits that are timed, and how many of them
SHORT, LONG, CHECKS = 5, 25, 3
#: share of the time that is planned for; the rest is for steps that are slower than the first
PLANNED = 0.75


class TookTooLong(Exception):
    """A fit was not done when its time was up."""


def steps_in(fit: Fit, options: FitOptions, seconds: float) -> int:
    """How many steps can be done, what was measured included; at least one, at most those asked.

    Args:
        fit: what is to be run.
        options: with the steps that are asked for.
        seconds: for everything.
    """
    started = time.monotonic()
    begun, intervals = 0.0, []
    for every in (SHORT, LONG):
        times: list[float] = []
        start = time.monotonic()
        fit(replace(options, steps=CHECKS * every, check_every=every, early_stop=False),
            lambda _, times=times: times.append(time.monotonic()))  # fmt: skip
        begun = times[0] - start
        intervals.append(median(b - a for a, b in pairwise(times)))
    step = max((intervals[1] - intervals[0]) / (LONG - SHORT), 1e-6)
    look = max(intervals[0] - SHORT * step, 0.0)
    left = PLANNED * seconds - (time.monotonic() - started) - begun
    affordable = math.floor(left / (step + look / options.check_every))
    return max(1, min(options.steps, affordable))


def fit_in(fit: Fit, options: FitOptions, seconds: float) -> FitResult:
    """Run a fit with as many of its steps as there is time for; the schedule ends with them.

    Args:
        fit: runs it.
        options: with the steps that are asked for.
        seconds: for everything; infinity asks for no measuring.

    Raises:
        TookTooLong: the steps were slower than the first ones told.
    """
    if math.isinf(seconds):
        return fit(options, lambda _: None)
    ends = time.monotonic() + seconds
    steps = steps_in(fit, options, seconds)

    def watch(check: Check) -> None:
        if time.monotonic() > ends:
            raise TookTooLong(f"over the limit of {seconds:.0f} s after {check.step} steps")

    return fit(replace(options, steps=steps, check_every=min(options.check_every, steps)), watch)

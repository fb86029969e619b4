"""Launches of a compiled kernel by Triton's shortest way.

`kernel[grid](...)` looks for the stream and gathers what a profiler might ask, and calls its hooks,
whether there are any or not. That takes longer than the launch itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any


class DirectLaunch:
    """Launches one compiled kernel on the current device, on its current stream.

    Args:
        compiled: what Triton's launch gave back. Everything that it specialised on must hold for
            what is launched here: nothing is checked.
    """

    def __init__(self, compiled: Any) -> None:
        from triton.runtime import driver

        self._compiled = compiled
        self._run = compiled.run  # makes sure that the kernel is loaded
        self._constant = (compiled.function, compiled.packed_metadata, None, None, None)
        self._driver = driver.active

    def __call__(self, programs: int, arguments: Iterable[Any]) -> None:
        """Launch so many programs with these arguments, the constants among them."""
        if is_watched():
            self._compiled[programs, 1, 1](*arguments)
            return
        driver = self._driver
        stream = driver.get_current_stream(driver.get_current_device())
        self._run(programs, 1, 1, stream, *self._constant, *arguments)


def direct(compiled: Any) -> DirectLaunch | None:
    """How to launch it again; None for what is no compiled kernel, as the interpreter gives."""
    return None if compiled is None else DirectLaunch(compiled)


def is_watched() -> bool:
    """Whether somebody wants to be told of launches, as Triton's profiler does."""
    runtime = _runtime()
    return _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook)


def _has_calls(hook: Any) -> bool:
    # chains of hooks are there from the start; a function, or nothing, may have taken their place
    return bool(getattr(hook, "calls", hook))


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime

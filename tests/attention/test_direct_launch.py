"""Launches of compiled kernels by Triton's shortest way."""

from __future__ import annotations

from typing import Any

import pytest

from flashbias_convert.attention.direct_launch import direct

triton = pytest.importorskip("triton")


class Driver:
    """Of a card that is not there; every device has a stream of its own."""

    def __init__(self) -> None:
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device


class Compiled:
    """What Triton's launch gives back: notes who launched it, and how."""

    packed_metadata = "metadata"

    def __init__(self) -> None:
        self.loaded = False
        self.direct: list[Any] = []
        self.watched: list[Any] = []

    @property
    def run(self) -> Any:
        self.loaded = True
        return lambda *args: self.direct.append(args)

    @property
    def function(self) -> str:
        assert self.loaded, "a kernel has no function before it is loaded"
        return "function"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.watched.append((grid, args))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    return made


def test_a_kernel_goes_to_the_current_stream_of_the_current_device(driver: Driver) -> None:
    compiled = Compiled()
    launch = direct(compiled)
    assert launch is not None
    launch(7, ["x", 3])
    driver.device = 2
    launch(8, ("y", 4))
    of_kernel = ("function", "metadata", None, None, None)
    assert compiled.direct == [
        (7, 1, 1, 100, *of_kernel, "x", 3),
        (8, 1, 1, 102, *of_kernel, "y", 4),
    ]
    assert not compiled.watched


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_launches(
    name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled()
    launch = direct(compiled)
    assert launch is not None
    chain = getattr(triton.knobs.runtime, name)
    chain.add(print)
    launch(7, ["x"])
    chain.remove(print)
    launch(8, ["x"])
    monkeypatch.setattr(triton.knobs.runtime, name, print)  # a function in the chain's place
    launch(9, ["x"])
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    launch(10, ["x"])
    assert [grid for grid, _ in compiled.watched] == [(7, 1, 1), (9, 1, 1)]
    assert [args[0] for args in compiled.direct] == [8, 10]


def test_the_interpreter_leaves_nothing_to_launch() -> None:
    assert direct(None) is None

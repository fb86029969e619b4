"""Launches of backward kernels: what is kept between calls, and what must not be mistaken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashbias_convert.attention import backward_kernel
from flashbias_convert.attention.backward_kernel import run_kernel
from flashbias_convert.attention.known_layouts import layout_number
from flashbias_convert.attention.tuning import LaunchSettings


class Kernel:
    """Notes how it is launched: by Triton's way, or as what that has compiled."""

    arg_names = ("x", "n", "BM", "FLAG")

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **named: Any) -> Kernel.Compiled:
            self.compiled.append((grid, args, named))
            return Kernel.Compiled(self.launched)

        return run

    class Compiled:
        """What Triton hands back."""

        def __init__(self, launched: list[Any]) -> None:
            self.launched = launched


@pytest.fixture(autouse=True)
def _noted_direct_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def direct(made: Kernel.Compiled) -> Any:
        """It takes all arguments in order."""
        return lambda programs, args: made.launched.append((programs, args))

    monkeypatch.setattr(backward_kernel, "direct", direct)


SETTINGS = LaunchSettings(64, 32, 4, 2)


def run(kernel: Any, x: torch.Tensor, n: int = 3, flag: bool = True, programs: int = 5) -> None:
    run_kernel(
        kernel, programs, (x, n), {"FLAG": flag, "BM": 64}, SETTINGS,
        layout=layout_number({"x": x}), numbers=(n,),
    )  # fmt: skip


def test_a_second_call_takes_what_was_compiled() -> None:
    kernel, x, y = Kernel(), torch.zeros(4, 8), torch.ones(4, 8)
    run(kernel, x)
    options = {"num_warps": 4, "num_stages": 2}
    assert kernel.compiled == [((5,), (x, 3), {"FLAG": True, "BM": 64, **options})]
    run(kernel, y, programs=7)
    assert len(kernel.compiled) == 1
    ((programs, args),) = kernel.launched
    assert programs == 7 and args[0] is y
    assert args[1:] == (3, 64, True)  # in the kernel's order, not in that of the constants


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(4, 8, dtype=torch.float16)},
        {"x": torch.zeros(8, 4).T},
        {"x": torch.zeros(4, 9)},
        {"x": torch.zeros(4 * 8 + 1)[1:].view(4, 8)},  # begins between two vectors
        {"n": 16},
        {"flag": False},
    ],
    ids=["dtype", "strides", "shape", "alignment", "number", "constant"],
)
def test_what_triton_would_compile_anew_is_compiled_anew(other: dict[str, Any]) -> None:
    kernel, given = Kernel(), {"x": torch.zeros(4, 8)}
    run(kernel, **given)
    run(kernel, **given | other)
    assert len(kernel.compiled) == 2 and not kernel.launched
    run(kernel, **given | other)
    assert len(kernel.compiled) == 2 and len(kernel.launched) == 1


def test_another_kernel_has_its_own() -> None:
    first, second, x = Kernel(), Kernel(), torch.zeros(2)
    run(first, x)
    run(second, x)
    assert len(first.compiled) == len(second.compiled) == 1


def test_nothing_is_launched_for_no_programs() -> None:
    kernel = Kernel()
    run(kernel, torch.zeros(2), programs=0)
    assert not kernel.compiled and not kernel.launched


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_kernel, "MAX_PLANS", 4)
    monkeypatch.setattr(backward_kernel, "_COMPILED", {})
    kernel = Kernel()
    for n in range(20):
        run(kernel, torch.zeros(2), n=n)
    assert len(backward_kernel._COMPILED) <= 4

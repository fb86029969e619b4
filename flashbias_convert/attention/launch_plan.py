"""A launch of a Triton kernel, with everything worked out that does not change between calls.

With a small input a call would otherwise spend more time in Python than on the card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .descriptors import TileDescriptor
from .direct_launch import DirectLaunch, direct
from .strides import VECTOR_BYTES

#: How many plans to keep of a kind; a model has a few dozen.
MAX_PLANS = 4096
_AS_IT_IS = nullcontext()


class Launchable(Protocol):
    """What launches a call."""

    def run(
        self, device: torch.device, tensors: Iterable[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        """Launch on `device`, on which the tensors are; numbers are the scale and a position."""


class LaunchPlan:
    """Arguments and grid of a launch, but for tensors and a few numbers.

    Args:
        kernel: Triton's.
        arguments: the kernel's arguments by name, in its order; what changes between calls is None.
        tensors: names of the arguments that are tensors, in the order of `run`.
        numbers: names of the other arguments that change between calls, in the order of `run`.
        grid: number of programs.
        options: of the launch.
        whole_rows: (flag, tensors): the kernel may be told `flag` only where these are aligned.
        tiles: (argument, tensor, what describes it): the argument that describes this tensor to
            the card, which is None where the tensor is not aligned.
    """

    def __init__(
        self,
        kernel: Any,
        arguments: Mapping[str, Any],
        tensors: Iterable[str],
        numbers: Iterable[str] = (),
        *,
        grid: int,
        options: Mapping[str, Any],
        whole_rows: tuple[str, tuple[str, ...]] | None = None,
        tiles: tuple[str, str, TileDescriptor] | None = None,
    ) -> None:
        place = {name: i for i, name in enumerate(arguments)}
        self.kernel, self.options, self.programs = kernel, options, grid
        self._names, self._values = tuple(arguments), list(arguments.values())
        self._tensors = [place[name] for name in tensors]
        self._numbers = [place[name] for name in numbers]
        flag, rows = whole_rows or ("", ())
        self._flag, self._rows = place.get(flag), [place[name] for name in rows]
        self._tiles = None if tiles is None else (place[tiles[0]], place[tiles[1]], tiles[2])
        #: by which tensors are aligned
        self._compiled: dict[int, DirectLaunch | None] = {}

    def arguments(self) -> dict[str, Any]:
        """The kernel's by name; what changes between calls is None."""
        return dict(zip(self._names, self._values, strict=True))

    def run(
        self, device: torch.device, tensors: Iterable[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        """Launch on `device`, on which the tensors are."""
        values, aligned = self._values.copy(), 0
        for place, tensor in zip(self._tensors, tensors, strict=True):
            values[place] = tensor
            aligned = 2 * aligned + (tensor.data_ptr() % VECTOR_BYTES == 0)
        for place, number in zip(self._numbers, numbers, strict=True):
            values[place] = number
        if self._tiles is not None:
            argument, place, descriptor = self._tiles
            values[argument] = descriptor.of(values[place])
        with on_device(device):
            self._launch(values, aligned)

    def _launch(self, values: list[Any], aligned: int) -> None:
        compiled = self._compiled.get(aligned)
        if compiled is not None:
            # everything that Triton specialises on is in the plan, so its checks can be skipped
            compiled(self.programs, values)
            return
        if self._flag is not None and any(values[i].data_ptr() % VECTOR_BYTES for i in self._rows):
            values[self._flag] = False
        made = self.kernel[(self.programs,)](*values, **self.options)
        self._compiled[aligned] = direct(made)


def layout_of(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, of its tensors."""
    return tuple([(t.dtype, t.shape, t.stride()) for t in tensors])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' own device the current one: Triton launches on that."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _AS_IT_IS

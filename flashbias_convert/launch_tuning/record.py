"""The launches that a model causes, one for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attention import launch
from ..attention.packing import GroupSpec
from ..attention.tuning import LaunchShape


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of the forward kernel, to be repeated.

    Attributes:
        shape: what its settings depend on.
        spec, tensors, options: arguments of `attention.launch.launch`.
    """

    shape: LaunchShape
    spec: GroupSpec
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]

    def run(self) -> None:
        """Launch it; writes the output tensor that the first call had."""
        launch.launch(self.spec, self.tensors, **self.options)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Note the first launch of every shape while the block runs.

    Their tensors are kept alive, so calls should be no larger than they need to be.
    """
    known: set[LaunchShape] = set()
    found: list[Launch] = []

    def note(spec: GroupSpec, tensors: Mapping[str, Tensor], options: dict[str, Any]) -> None:
        given = {name: own for name, own in options.items() if name != "query_start"}
        shape = launch.shape_of(spec, tensors, **given).rounded()
        if shape not in known:
            known.add(shape)
            found.append(Launch(shape, spec, dict(tensors), options))

    with launch.observed(note):
        yield found

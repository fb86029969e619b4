"""The launches that a model causes, one for each class of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attention import launch
from ..attention.local_settings import ShapeClass
from ..attention.packing import GroupSpec


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of the forward kernel, to be repeated.

    Attributes:
        shape: what its settings depend on.
        spec, tensors, options: arguments of `attention.launch.launch`.
    """

    shape: ShapeClass
    spec: GroupSpec
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]

    def run(self) -> None:
        """Launch it; writes the output tensor that the first call had."""
        launch.launch(self.spec, self.tensors, **self.options)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Note the first launch of every class of shapes while the block runs.

    Their tensors are kept alive, so calls should be no larger than they need to be.
    """
    known: set[ShapeClass] = set()
    found: list[Launch] = []

    def note(spec: GroupSpec, tensors: Mapping[str, Tensor], options: dict[str, Any]) -> None:
        shape = ShapeClass.of(**launch.shape_of(spec, tensors))
        if shape not in known:
            known.add(shape)
            found.append(Launch(shape, spec, dict(tensors), options))

    with launch.observed(note):
        yield found

"""A launch in which several programs share the keys of a row, and the one that adds them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch_plan import LaunchPlan


class PartedPlan:
    """Two launches, and the numbers that the first leaves for the second.

    Args:
        first: of `attention_kernel`; its last tensor is what `combine_parts_kernel` reads.
        arguments: of the first, by name.
        tensors: names of the tensors of the call, in the order of `run`.
        parts: programs that share the keys of a row.
        rows: of the output that this launch writes.
    """

    def __init__(
        self,
        first: LaunchPlan,
        arguments: Mapping[str, Any],
        tensors: Sequence[str],
        *,
        parts: int,
        rows: int,
    ) -> None:
        self.first = first
        # of each row and part: a sum of values, the level of its weights, and their total
        self.size = rows * parts * (arguments["DV"] + 2)
        taken = [name for name in ("o", "heads") if name in tensors]
        self._taken = [tensors.index(name) for name in taken]
        self.second = _combining(arguments, taken, parts=parts, rows=rows)

    def run(
        self, device: torch.device, tensors: Iterable[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        """Launch on `device`, on which the tensors are."""
        given = tuple(tensors)
        left = torch.empty(self.size, dtype=torch.float32, device=device)
        self.first.run(device, (*given, left), numbers)
        self.second.run(device, (left, *(given[i] for i in self._taken)))


def _combining(
    arguments: Mapping[str, Any], taken: Iterable[str], *, parts: int, rows: int
) -> LaunchPlan:
    from .triton_combine import combine_parts_kernel

    own = {**arguments, "parts": parts, "PARTS": 1 << (parts - 1).bit_length()}
    return LaunchPlan(
        combine_parts_kernel,
        {name: own[name] for name in combine_parts_kernel.arg_names},
        ["parts_ptr", *(f"{name}_ptr" for name in taken)],
        grid=rows,
        options={},
    )

"""How far outputs lie apart, beside how far rounding alone takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: how much worse than the original's own rounding an exact conversion may be
FACTOR = 2.0


@dataclass(frozen=True)
class Difference:
    """Numbers about one output, over all samples.

    Attributes:
        difference_max, difference_rms: converted against original, in the dtype in use.
        rounding_max, rounding_rms: the original in the dtype in use against itself in the wider
            one: what rounding alone does.
        error_max, error_rms: converted against the original in the wider dtype.
        largest: largest absolute value of the original in the wider dtype.
        allowed_max, allowed_rms: twice the rounding, plus one unit in the last place of the
            largest value, and of the root mean square of all: what the errors of an exact
            conversion stay within.
        not_finite: which of the three holds NaN or infinity; "" if none does. Then every number
            is NaN.
    """

    difference_max: float
    difference_rms: float
    rounding_max: float
    rounding_rms: float
    error_max: float
    error_rms: float
    largest: float
    allowed_max: float
    allowed_rms: float
    not_finite: str = ""

    @property
    def within_rounding(self) -> bool:
        """Whether the converted model is as close to the truth as an exact one must be."""
        # written so that NaN says no
        return self.error_max <= self.allowed_max and self.error_rms <= self.allowed_rms

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; None where a number is not finite."""
        return {k: _plain(v) for k, v in vars(self).items()} | {
            "within_rounding": self.within_rounding
        }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Accumulator:
    """Collects the numbers of a `Difference`, batch by batch.

    Args:
        dtype: the dtype in use.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._eps = torch.finfo(dtype).eps
        self._max = dict.fromkeys(("difference", "rounding", "error", "value"), 0.0)
        self._squares = dict.fromkeys(self._max, 0.0)
        self._count = 0
        self._not_finite: list[str] = []

    def add(self, plain: Tensor, converted: Tensor, wide: Tensor) -> None:
        """Take in one output: tensors of one shape, from the three models."""
        named = {
            "the original": plain,
            "the original in the wider dtype": wide,
            "the converted model": converted,
        }
        bad = [name for name, tensor in named.items() if not bool(tensor.isfinite().all())]
        self._not_finite += [name for name in bad if name not in self._not_finite]
        if bad:
            return
        a, b, truth = plain.double(), converted.double(), wide.double()
        found = {"difference": b - a, "rounding": a - truth, "error": b - truth, "value": truth}
        self._count += truth.numel()
        for name, values in found.items():
            if values.numel():
                self._max[name] = max(self._max[name], float(values.abs().max()))
                self._squares[name] += float(values.square().sum())

    def result(self) -> Difference:
        """The numbers so far."""
        largest, root = dict(self._max), {k: self._root(v) for k, v in self._squares.items()}
        if self._not_finite:
            largest, root = dict.fromkeys(largest, math.nan), dict.fromkeys(root, math.nan)
        return Difference(
            difference_max=largest["difference"],
            difference_rms=root["difference"],
            rounding_max=largest["rounding"],
            rounding_rms=root["rounding"],
            error_max=largest["error"],
            error_rms=root["error"],
            largest=largest["value"],
            allowed_max=FACTOR * largest["rounding"] + self._eps * largest["value"],
            allowed_rms=FACTOR * root["rounding"] + self._eps * root["value"],
            not_finite=" and ".join(self._not_finite),
        )

    def _root(self, squares: float) -> float:
        return math.sqrt(squares / self._count) if self._count else 0.0

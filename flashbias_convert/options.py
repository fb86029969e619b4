"""The options of a conversion: one object for the API, the command line and the saved plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from .errors import UsageError

Method = Literal["auto", "exact", "svd", "neural"]
#: what a saved plan says of itself
PLAN_FORMAT = "flashbias-convert plan"
#: card classes that can be named as `DecomposeOptions.target`
TARGETS = ("a100", "h100", "h200")
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class DecomposeOptions:
    """How a bias becomes terms.

    Attributes:
        energy: share of the squared singular values of the row-centred bias to keep, in (0, 1].
            1.0 means exact terms only.
        method: "auto" takes the cheapest term per head that is good enough, "exact" keeps every
            bit of the bias, "svd" truncates (FlashBias, section 3.2).
        max_rank: cap on the rank; a head that misses `energy` under the cap takes another term.
        max_attention_error: guard, in [0, 1]: the largest acceptable total variation distance
            between the softmax of the bias and of its approximation, mean over rows.
        target: card class to plan for, one of `TARGETS`, or None. It is kept with the plan; costs
            were measured on Hopper alone, and serve all.
        fill: raise ranks to what a kernel computes with anyway (16, 32, 64, ... columns): more
            accurate at the same speed. False keeps the smallest rank that holds `energy`.
        diagonal: also try low rank plus a diagonal, for biases with a value of their own where a
            token meets itself; taken where it needs fewer columns of a kernel. Square sites only,
            and slow: many SVDs per head.
        force_all: convert sites that would not get faster, too.
        tokens: sequence length to plan for where the model leaves it open (language models).
        max_output_error: what `calibrate_model` allowed the outputs to change, relatively; None
            where ranks were chosen without inputs.
        version: of this schema.
    """

    energy: float = 0.99
    method: Method = "auto"
    max_rank: int | None = None
    max_attention_error: float = 0.25
    target: str | None = None
    fill: bool = True
    diagonal: bool = False
    force_all: bool = False
    tokens: int | None = None
    max_output_error: float | None = None
    version: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.energy <= 1.0:  # also catches NaN
            raise UsageError(f"energy must be in (0, 1], got {self.energy}", "0.99 is a good start")
        if self.method not in get_args(Method):
            raise UsageError(f"method must be one of {get_args(Method)}, got {self.method!r}")
        if self.max_rank is not None and self.max_rank < 1:
            raise UsageError(f"max_rank must be at least 1, got {self.max_rank}")
        if not 0.0 <= self.max_attention_error <= 1.0:
            raise UsageError(
                f"max_attention_error must be in [0, 1], got {self.max_attention_error}"
            )
        if self.target is not None and self.target not in TARGETS:
            raise UsageError(
                f"target must be one of {', '.join(TARGETS)}, got {self.target!r}",
                "leave it out: one cost table serves all cards",
            )
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise UsageError(f"tokens must be a positive integer, got {self.tokens!r}")
        if self.version != 1:
            raise UsageError(
                f"options of version {self.version} are not understood, only version 1",
                "update flashbias-convert",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; raises UsageError for unknown names or bad values."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise UsageError(f"unknown options {sorted(unknown)}, known are {sorted(known)}")
        return cls(**data)


def shard_bytes(size: int | str) -> int:
    """Bytes in a size such as ``5GB`` (also KB, MB, TB), or a number of bytes.

    Raises:
        UsageError: neither, or nothing at all.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", str(size).strip().upper())
    number = int(float(found[1]) * _SIZE_UNITS[found[2]]) if found else size
    if type(number) is not int or number < 1:
        raise UsageError(f"cannot read the size of a shard {size!r}", "write for instance 5GB")
    return number

"""What was decided for one head, and what it costs in accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..terms import ScoreBias


def kernel_columns(rank: int, split: int) -> int:
    """What factors of this rank take of a kernel in half precision; a split column takes three."""
    return rank + 2 * min(split, rank)


@dataclass(frozen=True)
class HeadDecision:
    """The term that carries one head's bias, and what was lost.

    Attributes:
        head: index of the head.
        term: kind of the term, "low_rank+diagonal" for the two together, or "none" where the bias
            is constant along rows.
        rank: rank of a low-rank term, else None.
        energy: kept share of squared singular values of the row-centred bias, in [0, 1].
        logit_error_max: largest |b - b_hat| after row-centring.
        logit_error_rms: root mean square of the same.
        attention_error: total variation distance between softmax(b) and softmax(b_hat), mean
            over rows, in [0, 1].
        reason: why this term and no other.
        split: leading columns of a low-rank term that half precision carries as two parts, each of
            which takes three columns of the kernel.
    """

    head: int
    term: str
    rank: int | None
    energy: float
    logit_error_max: float
    logit_error_rms: float
    attention_error: float
    reason: str
    split: int = 0

    def columns(self) -> int:
        """Of factors, as the kernel has them before it pads; 0 without factors."""
        return kernel_columns(self.rank or 0, self.split)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The terms of one bias, with a decision per head.

    Attributes:
        bias: the terms, without masks.
        decisions: one per head, in order.
        left_alone: why the site would gain nothing, or None if it should be converted.
        in_vain: factors were made that nothing uses, as they do not pay.
    """

    bias: ScoreBias
    decisions: tuple[HeadDecision, ...]
    left_alone: str | None = None
    in_vain: bool = False
